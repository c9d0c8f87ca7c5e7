"""Tests of explaining why this machine cannot run a step, and of what the log of a run says of a variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlcbuild.build.changes import Change
from mlcbuild.build.events import RunResult, StepResult
from mlcbuild.build.graph import Graph, Step
from mlcbuild.build.plan import Planned
from mlcbuild.errors import StepError
from mlcbuild.outcomes import VariantResult, explained, run_log
from mlcbuild.pipeline import Product
from mlcbuild.reports.runlog import Clock

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


def test_the_log_of_a_variant_states_the_error_of_a_step_that_was_merged_with_another() -> None:
    graph = Graph(Step(f"weights/m/{name}", "tests.actions:text", {}, {}) for name in ("a", "b"))
    assert graph.resolve("weights/m/b") == "weights/m/a"
    place = SimpleNamespace(line=1, column=1)
    variant: Any = SimpleNamespace(
        name="v",
        model=SimpleNamespace(name="m", place=place),
        quantization="b",
        target=SimpleNamespace(name="t"),
    )
    product = Product(variant, ("weights/m/b",), "library/v", "bundle/v", None)
    failed = StepResult("weights/m/a", "failed", error=StepError("the disk is gone"))
    pipeline: Any = SimpleNamespace(graph=graph, recipe=SimpleNamespace(name="r", path="r.yaml"))
    ended = VariantResult(product, "failed", note="a step of it failed")
    log = run_log(pipeline, RunResult((failed,), 1.0), Clock(lambda event: None), [ended])
    assert log.variants[0].words == "the disk is gone"
