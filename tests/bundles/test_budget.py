"""Tests of how a budget of size or of loss chooses a scheme for each matrix."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild import quant
from mlcbuild.bundles.budget import Option, hull, ladder_of
from mlcbuild.bundles.weight_losses import open_trial
from mlcbuild.canon import Entry
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.errors import InputError, UsageError
from mlcbuild.pipeline import build
from mlcbuild.quant.choice import CHOICE, scheme_of
from mlcbuild.recipe import load
from mlcbuild.store.store import Store
from tests.budgets import PARAMS, chosen, inputs
from tests.checkpoint_files import shorten
from tests.conftest import checked, mlcbuild, project
from tests.libharness import EVERY
from tests.recipes import readme_recipes
from tests.schemes import SCHEMES

__all__ = ["inputs"]

pytestmark = pytest.mark.xdist_group("budget")  # so that one process measures the losses


def test_a_mixture_keeps_its_size_and_loses_less_than_one_scheme_of_that_size(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    trial = open_trial(PARAMS, inputs)
    params = tuple(trial.params.values())
    size = quant.stored_bytes(params, SCHEMES["q5a8_1"])
    report = chosen(inputs, tmp_path / "out", "max_size", size)
    scheme = scheme_of(PARAMS, {"budget": tmp_path / "out"})
    assert report["bytes"] == quant.stored_bytes(params, scheme) <= size
    assert report["bits"] == pytest.approx(
        8 * report["bytes"] / sum(math.prod(p.shape) for p in params), 1e-3
    )
    assert report["kl"] == pytest.approx(trial.loss(scheme), rel=1e-3)
    assert report["kl"] < 0.8 * trial.loss(SCHEMES["q5a8_1"])
    assert sum(matrix["bytes"] for matrix in report["matrices"]) < report["bytes"]


def test_the_smallest_mixture_within_a_loss_is_chosen(inputs: dict[str, Path], tmp_path: Path) -> None:
    report = chosen(inputs, tmp_path / "out", "max_kl", 0.005)
    assert report["kl"] <= 0.005
    smaller = max(size for size, _ in report["curve"] if size < report["bytes"])
    assert chosen(inputs, tmp_path / "less", "max_size", smaller)["kl"] > 0.005


def test_a_loss_that_no_mixture_reaches_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"max_kl is 1e-09, but the loss is [\d.e-]+ with the best mixture of q4a8_1, q5a8_1, q8a8_1; "
        "raise max_kl, or add larger candidates",
    ):
        chosen(inputs, tmp_path / "out", "max_kl", 1e-9)


def test_a_size_below_the_smallest_mixture_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"max_size is 1.0 kB, but the smallest mixture of q4a8_1, "):
        chosen(inputs, tmp_path / "out", "max_size", 1000)


def test_the_fragment_is_the_same_scheme_in_a_recipe(inputs: dict[str, Path], tmp_path: Path) -> None:
    chosen(inputs, tmp_path / "out", "target_bits", 5.0)
    text = "version: 1\nmodels: {tiny: ./tiny}\ntargets: [x86-64-v3]\n"
    recipe = load(project(tmp_path, text + (tmp_path / "out" / "quantization.yaml").read_text()))
    scheme = scheme_of(PARAMS, {"budget": tmp_path / "out"})
    assert scheme.overrides
    assert quant.storage(recipe.schemes["small"], lambda candidate: "x16") == scheme


def test_the_recipe_of_the_guide(tmp_path: Path, common_store: Path) -> None:
    """Builds the guide's recipe for a quantization with a budget of bits per weight. Checks that the formats
    which the budget chooses are recorded in the bundle and in its report, and that the recipe text which the
    report suggests produces the same weights and asks the compiler for the same library, which is compiled
    again with MLCBUILD_TEST_EVERY only."""
    (text,) = (block for block in readme_recipes() if "target_bits" in block)
    recipe = project(tmp_path, text.replace("models/tiny", "./tiny"))
    shorten(tmp_path / "tiny", 2)
    planned = checked(mlcbuild("plan", recipe, store=common_store))
    assert "budget/tiny/close" in planned
    only = ("--only", "tiny-small-host")
    ran = json.loads(checked(mlcbuild("run", recipe, *only, "--json", store=common_store)))
    bundle = tmp_path / "dist" / "tiny-small-host"
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    report = json.loads((bundle / "budget.json").read_bytes())
    assert report["bits"] <= 5.25
    assert manifest["scheme"]["name"] == report["scheme"]
    assert {item["scheme"]["bits"] for item in manifest["scheme"]["overrides"]} == {8}
    assert {"budget.json", "quantization.yaml"} <= set(manifest["files"])
    assert manifest["verification"]["kl_mean"] == pytest.approx(report["kl"], rel=0.25)
    checked(mlcbuild("verify", bundle, store=common_store))
    checked(mlcbuild("report", recipe, "-o", tmp_path / "report.html", store=common_store))
    page = (tmp_path / "report.html").read_text()
    assert "tiny, small" in page
    assert "<title>layers.0.attn.qkv: q" in page
    first = library_params(recipe)
    (choice,) = (file for file in files_of(ran, "budget/", common_store) if file.path == CHOICE)
    (tmp_path / "budget").mkdir()
    shutil.copy(blob(choice, common_store), tmp_path / "budget" / choice.path)
    fragment = (bundle / "quantization.yaml").read_text()
    recipe.write_text(f"version: 1\nmodels: {{tiny: ./tiny}}\ntargets: [host]\n{fragment}")
    second = library_params(recipe)
    assert scheme_of(first, {"budget": tmp_path / "budget"}) == scheme_of(second, {})
    assert [first.pop(name) for name in ("target", "limits")] == [
        second.pop(name) for name in ("target", "limits")
    ]
    assert [*first, *second] == ["candidates", "scheme"]
    only = ("--only", "*") if EVERY else ("--only", "weights/*")
    again = json.loads(checked(mlcbuild("run", recipe, *only, "--json", store=common_store)))
    assert files_of(again, "weights/", common_store) == files_of(ran, "weights/", common_store)
    assert not EVERY or files_of(again, "library/", common_store) == files_of(ran, "library/", common_store)


def library_params(recipe: Path) -> dict[str, Any]:
    """Returns the parameters of the step that compiles the library of a recipe's first variant."""
    pipeline = build(load(recipe), Lock({}))
    (name,) = (name for name in pipeline.products[0].steps if name.startswith("library/"))
    return dict(pipeline.graph.step(name).params)


def files_of(run: dict[str, Any], kind: str, store: Path) -> tuple[Entry, ...]:
    """Returns the files of the result of the one step of a run whose name begins with `kind`. run: what
    `mlcbuild run --json` printed."""
    (key,) = (step["key"] for step in run["steps"] if step["name"].startswith(kind))
    record = Store(store).record(key)
    assert record is not None
    return record.files


def test_the_recipe_of_the_guide_with_budgets_in_a_list(tmp_path: Path, common_store: Path) -> None:
    """Checks that budgets in a list of quantizations are named after their key and value in plans, bundles,
    reports and suggested recipe texts. The bundle is built with MLCBUILD_TEST_EVERY only."""
    (text,) = (block for block in readme_recipes() if "[q8a8_1, {max_size" in block)
    recipe = project(tmp_path, text.replace("models/tiny", "./tiny"))
    planned = checked(mlcbuild("plan", recipe, store=common_store))
    assert "budget/tiny/max_size-700kB" in planned and "budget/tiny/max_kl-0.02" in planned
    assert "bundle/tiny-max_size-700kB-host" in planned
    only = "tiny-max_size-700kB-host" if EVERY else "budget/tiny/max_size-700kB"
    run = json.loads(checked(mlcbuild("run", recipe, "--only", only, "--json", store=common_store)))
    files = {file.path: blob(file, common_store) for file in files_of(run, "budget/", common_store)}
    report = json.loads(files["budget.json"].read_bytes())
    assert report["bytes"] <= 700_000 and report["kind"] == "max_size"
    if EVERY:
        bundle = tmp_path / "dist" / "tiny-max_size-700kB-host"
        assert (bundle / "budget.json").read_bytes() == files["budget.json"].read_bytes()
        manifest = json.loads((bundle / "bundle.json").read_bytes())
        assert manifest["scheme"]["name"] == report["scheme"] and manifest["scheme"]["overrides"]
        checked(mlcbuild("report", recipe, "-o", tmp_path / "report.html", store=common_store))
        assert "tiny, max_size-700kB" in (tmp_path / "report.html").read_text()
    fragment = files["quantization.yaml"].read_text()
    recipe.write_text(f"version: 1\nmodels: {{tiny: ./tiny}}\ntargets: [host]\n{fragment}")
    scheme = load(recipe).schemes["max_size-700kB"]
    assert scheme.name == report["scheme"] and scheme.overrides


def blob(file: Entry, store: Path) -> Path:
    return store / "cas" / file.digest[:2] / file.digest


PLAN = """\
version: 1
models: {{tiny: ./tiny}}
quantizations: {{s: {{target_bits: {}}}}}
targets: [x86-64-v3]
"""


def test_a_budget_below_all_candidates_is_reported_in_the_recipe(tmp_path: Path) -> None:
    text = PLAN.format("4.25")
    with pytest.raises(
        InputError,
        match=r"recipe.yaml:2:16: model 'tiny', quantization 's': target_bits is 4.25, but the smallest "
        r"mixture of q4a8_1, q4a8_2, .* has 4.516 bits a weight, 586.9 kB; raise target_bits, or add smaller "
        "candidates",
    ):
        build(load(project(tmp_path, text)), Lock({}))


def test_later_steps_read_the_choice_only(tmp_path: Path) -> None:
    text = PLAN.format("5")
    pipeline = build(load(project(tmp_path, text)), Lock({}))
    graph = pipeline.graph
    for name in pipeline.products[0].steps:
        if name.startswith(("weights/", "library/")):
            assert graph.step(name).inputs["budget"].select == ("choice.json",)
            modules = graph.step(name).code
            assert {f"mlcbuild.quant.formats.{form}" for form in ("q4s", "q6l", "q8s")} <= set(modules)
    assert graph.step("budget/tiny/s").params["limit"] == "5.0"


options = st.lists(
    st.builds(Option, st.just("a"), st.integers(1, 1000), st.integers(0, 1000).map(lambda n: n / 1000)),
    min_size=1,
    max_size=6,
)


@given(options)
def test_a_hull_is_convex_and_below_all_options(listed: list[Option]) -> None:
    corners = hull(listed)
    assert corners[0].bytes == min(option.bytes for option in listed)
    slopes = [(a.loss - b.loss) / (b.bytes - a.bytes) for a, b in pairwise(corners)]
    assert all(slope > 0 for slope in slopes)
    assert all(first > second for first, second in pairwise(slopes))
    sizes, losses = [corner.bytes for corner in corners], [corner.loss for corner in corners]
    for option in listed:
        assert option.loss >= np.interp(option.bytes, sizes, losses) - 1e-9


@given(st.lists(options, min_size=1, max_size=4), st.integers(0, 5000))
def test_upgrades_fit_and_no_further_one_does(tables: list[list[Option]], extra: int) -> None:
    ladder = ladder_of({str(i): table for i, table in enumerate(tables)}, 7)
    most = ladder.size(ladder.smallest) + extra
    applied = ladder.within(most)
    mixture = ladder.mixture(applied)
    left = most - ladder.size(mixture)
    assert left >= 0
    for name in mixture:
        upgrades = [upgrade for upgrade in ladder.upgrades if upgrade.matrix == name]
        count = sum(upgrade.matrix == name for upgrade in applied)
        assert upgrades[:count] == [upgrade for upgrade in applied if upgrade.matrix == name]
        assert count == len(upgrades) or upgrades[count].bytes > left
