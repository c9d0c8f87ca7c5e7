"""A model family is added from outside, by the file that mlcbuild/README.md shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, TINY, project
from tests.guide import example

FILE = "mlcbuild/models/families/toy.py"

RECIPE = """\
version: 1
models: {tiny: ./tiny, toy: ./toy}
quantizations: [q4f16_1]
targets: [x86-64-v3]
"""

PROGRAM = """\
import json, sys
from pathlib import Path
from mlcbuild.build.plan import step_modules
from mlcbuild.canon import code_files
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.models.serial import to_json
from mlcbuild.pipeline import build
from mlcbuild.recipe import load

pipeline = build(load(Path(sys.argv[1])), Lock({}))
keys = {
    step.name: {
        "action": step.action,
        "params": step.params,
        "tools": dict(step.tools),
        "code": dict(pair for module in step_modules(step) for pair in code_files(module).items()),
    }
    for step in pipeline.graph.steps()
}
print(json.dumps({"configs": {name: to_json(item) for name, item in pipeline.configs.items()}, "keys": keys}))
"""
"""Prints the config of every model, and for every step what its key is computed from beside its inputs."""


def prospect(root: Path, recipe: Path) -> subprocess.CompletedProcess[str]:
    """Runs PROGRAM with the packages in `root`."""
    path = os.pathsep.join([str(root), str(ROOT / "runtime")])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(recipe)],
        cwd=recipe.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the package to which a family can be added."""
    for package in ("mlcbuild", "targets"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with a model of the family llama, and the same one under the model_type toy."""
    (tmp_path / "work").mkdir()
    path = project(tmp_path / "work", RECIPE)
    toy = path.parent / "toy"
    shutil.copytree(TINY, toy)
    config = toy / "config.json"
    values = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**values, "model_type": "toy", "architectures": ["ToyForCausalLM"]}))
    return path


def test_a_family_is_one_file(root: Path, recipe: Path) -> None:
    refused = prospect(root, recipe)
    assert refused.returncode != 0 and 'model_type: "toy" is not a supported family' in refused.stderr
    (root / FILE).write_text(example("Extend: a model family"))
    found = printed(prospect(root, recipe))
    llama, toy = found["configs"]["tiny"], found["configs"]["toy"]
    assert toy == {**llama, "family": "toy"}
    assert {name for name, parts in found["keys"].items() if FILE in parts["code"]} == {"config/toy"}


def test_a_new_family_moves_no_key(root: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace(", toy: ./toy", ""))
    before = printed(prospect(root, recipe))
    (root / FILE).write_text(example("Extend: a model family"))
    after = printed(prospect(root, recipe))
    assert "config/tiny" in after["keys"] and after == before
