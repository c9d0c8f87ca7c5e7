"""Tests of the part of a recipe that is planned or run, on a graph of two variants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.errors import SetupError, UsageError
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.selection import Selection, require_tools, select


def step(name: str, *needs: str) -> Step:
    return Step(name, "m:f", {"name": name}, {need: Input(need) for need in needs})


GRAPH = Graph([
    step("config/m"),
    *(step(f"{kind}/{v}", "config/m") for kind in ("library", "weights") for v in ("a", "b")),
    *(step(f"bundle/{v}", f"library/{v}", f"weights/{v}") for v in ("a", "b")),
    *(step(f"verify/{v}", f"bundle/{v}") for v in ("a", "b")),
    step("bench/a", "bundle/a"),
])  # fmt: skip


def product(name: str, bench: str | None = None) -> Product:
    variant: Any = SimpleNamespace(name=name)
    steps = ("config/m", *(f"{kind}/{name}" for kind in ("library", "weights", "bundle", "verify")))
    return Product(variant, steps, f"library/{name}", f"bundle/{name}", f"verify/{name}", bench=bench)


def pipeline(**lacks: str) -> Pipeline:
    recipe: Any = SimpleNamespace(path=None, directory=None)
    missing = {name.replace("_", "/"): words for name, words in lacks.items()}
    return Pipeline(recipe, GRAPH, (product("a", "bench/a"), product("b")), {}, missing)


def names(selected: Any) -> list[str]:
    return [item.variant.name for item in selected.products]


def test_everything_is_one_phase_with_every_bundle() -> None:
    selected = select(pipeline(), Selection())
    assert names(selected) == ["a", "b"] and selected.only is None and selected.phases == (None,)
    assert selected.outputs == ("bundle/a", "verify/a", "bench/a", "bundle/b", "verify/b")


def test_a_variant_is_selected_with_its_measurement() -> None:
    selected = select(pipeline(), Selection(only=("a",)))
    assert names(selected) == ["a"] and selected.only == ("verify/a", "bench/a")
    assert selected.phases == (("verify/a", "bench/a"),)
    assert set(selected.outputs) == {"verify/a", "bench/a", "bundle/a"}


def test_a_step_completes_no_variant() -> None:
    selected = select(pipeline(), Selection(only=("weights/*",)))
    assert names(selected) == [] and set(selected.outputs) == {"weights/a", "weights/b"}
    with pytest.raises(UsageError, match="nowhere"):
        select(pipeline(), Selection(only=("nowhere",)))


class Planned:
    """A plan in which the given steps run, and all others are reused."""

    def __init__(self, *running: str) -> None:
        self._running = running

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(state="run" if name in self._running else "reused")


def test_a_missing_tool_matters_only_for_steps_that_run() -> None:
    lacking = pipeline(library_a="there is no linker")
    everything = select(lacking, Selection())
    require_tools(lacking, everything, Planned("library/b"))  # type: ignore[arg-type]
    require_tools(lacking, select(lacking, Selection(only=("b",))), Planned("library/a"))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"^there is no linker\. a cannot be built here without it, and no"):
        require_tools(lacking, everything, Planned("library/a"))  # type: ignore[arg-type]
