"""Tests of explaining why this machine cannot run a step."""

from __future__ import annotations

from mlcbuild.build.changes import Change
from mlcbuild.build.plan import Planned
from mlcbuild.outcomes import explained

TOOLS = (
    Change("apache-tvm", "0.27", None, True),
    Change("linker", "GNU ld 2.40", "none", True),
)


def test_a_missing_linker_is_the_only_tool_that_is_gone() -> None:
    planned = Planned("library/a", "run", "0" * 64, "apache-tvm is gone; linker GNU ld 2.40 -> none")
    actual = explained(planned, TOOLS, {"library/a": "no linker was found: install lld"})
    assert actual.planned.reason == "cannot run here: no linker was found: install lld"
    assert actual.planned.key == planned.key
    assert actual.changes == TOOLS[1:]


def test_a_step_that_lacks_nothing_is_explained_by_all_its_changes() -> None:
    planned = Planned("library/b", "run", None, "apache-tvm is gone")
    actual = explained(planned, TOOLS, {"library/a": "no linker was found"})
    assert (actual.planned, actual.changes) == (planned, TOOLS)
