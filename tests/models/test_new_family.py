"""Tests that another package can add a model family with one file, the example of mlcbuild/README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, project
from tests.guide import example
from tests.outside import copy_package, printed, prospect

FILE = "mlcbuild/models/families/toy.py"

RECIPE = """\
version: 1
models: {tiny: ./tiny, toy: ./toy}
quantizations: [q4f16_1]
targets: [x86-64-v3]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy_package(tmp_path)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Writes a recipe with two copies of a llama model, one of which has the model_type `toy`, and returns
    its path."""
    (tmp_path / "work").mkdir()
    path = project(tmp_path / "work", RECIPE)
    toy = path.parent / "toy"
    shutil.copytree(TINY, toy)
    config = toy / "config.json"
    values = json.loads(config.read_text())
    config.unlink()
    changes = {"model_type": "toy", "architectures": ["ToyForCausalLM"], "sliding_window": 8}
    config.write_text(json.dumps({**values, **changes}))
    return path


def test_a_family_is_one_file(root: Path, recipe: Path) -> None:
    refused = prospect(root, recipe)
    assert refused.returncode != 0 and 'model_type: "toy" is not a supported family' in refused.stderr
    (root / FILE).write_text(example("Extend: a model family"))
    actual = printed(prospect(root, recipe))
    llama, toy = actual["configs"]["tiny"], actual["configs"]["toy"]
    (plain,) = llama["layer_specs"]
    full = {**plain, "mixer": {**plain["mixer"], "qk_norm": llama["norm"]}}
    window = {**plain, "mixer": {**full["mixer"], "window": 8}}
    layers = [index % 2 for index in range(len(llama["layers"]))]
    assert toy == {**llama, "family": "toy", "layer_specs": [window, full], "layers": layers}
    assert {name for name, parts in actual["keys"].items() if FILE in parts["code"]} == {"config/toy"}


def test_its_tensors_have_the_usual_names(root: Path, recipe: Path) -> None:
    (root / FILE).write_text(example("Extend: a model family"))
    names = printed(prospect(root, recipe))["names"]
    added = {f"layers.0.attn.{kind}_norm.weight" for kind in "qk"}
    assert added < names["toy"].keys()
    usual = {
        name: pieces
        for name, pieces in names["toy"].items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    assert usual == names["tiny"]
    ((tensor, _),) = names["toy"]["layers.0.attn.q_norm.weight"]
    assert tensor == "model.layers.0.self_attn.q_norm.weight"


def test_a_new_family_moves_no_key(root: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace(", toy: ./toy", ""))
    before = printed(prospect(root, recipe))
    (root / FILE).write_text(example("Extend: a model family"))
    after = printed(prospect(root, recipe))
    assert "config/tiny" in after["keys"] and after == before


def test_families_are_one_short_file_each() -> None:
    """Checks that each model family is one short file, because families share the blocks of which their
    layers consist."""
    for path in (ROOT / FILE).parent.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
