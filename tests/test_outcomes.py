"""Tests of explaining why this machine cannot run a step, of a variant whose model is on a hub, and of what
the log of a run says of a variant."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlcbuild import session
from mlcbuild.build.changes import Change
from mlcbuild.build.events import RunResult, StepResult
from mlcbuild.build.graph import Graph, Step
from mlcbuild.build.plan import Planned
from mlcbuild.checkpoints import lock
from mlcbuild.checkpoints.fetch import Pinned
from mlcbuild.checkpoints.hub import HubSource
from mlcbuild.errors import SourceError, StepError
from mlcbuild.execution import Execution
from mlcbuild.outcomes import VariantResult, explained, run_log
from mlcbuild.pipeline import Product
from mlcbuild.reports.runlog import Clock
from mlcbuild.selection import Selection
from tests.conftest import TINY, project

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


def test_a_model_on_a_hub_before_and_after_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a variant whose download failed says so, and that a plan states how much memory a model
    takes once its config is in the store."""
    target = "x86-64-v2"
    text = f"version: 1\nmodels: {{far: hf://org/name@main}}\nquantizations: [q0f32]\ntargets: [{target}]\n"
    recipe = project(tmp_path, text, [])
    files = {path.name: Pinned(path.stat().st_size, "b" * 64) for path in TINY.iterdir()}
    lock.write(
        tmp_path / "recipe.lock", lock.Lock({HubSource("org/name", "main"): lock.Locked("a" * 40, files)})
    )
    opened = session.open(recipe, store=tmp_path / "store")

    def refuse(params: object, inputs: object, out: Path) -> None:
        raise SourceError("the hub is down")

    def copy(params: object, inputs: object, out: Path) -> None:
        shutil.copytree(TINY, out, dirs_exist_ok=True)

    inline = Execution(executor="inline", keep_going=True)
    monkeypatch.setattr("mlcbuild.checkpoints.fetch.fetch", refuse)
    (variant,) = opened.run(execution=inline).variants
    assert (variant.status, variant.note) == ("skipped", "needs fetch/far, which failed")
    assert opened.plan().memory == {variant.name: None}
    monkeypatch.setattr("mlcbuild.checkpoints.fetch.fetch", copy)
    assert opened.run(Selection(only=("config/far",)), inline).ok
    local = project(tmp_path / "local", text.replace("hf://org/name@main", "./tiny"))
    expected = session.open(local, store=tmp_path / "store").plan().memory
    assert list(opened.plan().memory.values()) == list(expected.values())


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
