"""Copies the package mlcbuild to a directory, where a test can add files to it, and runs a program in this
copy that prints from what the cache keys of a recipe's steps are computed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import HALF_COMPILED, ROOT

PROGRAM = """\
import json, sys
from pathlib import Path
from mlcbuild.build.plan import step_modules
from mlcbuild.canon import code_files
from mlcbuild.checkpoints.lock import Lock
from mlcbuild.models.parsing import tensor_names
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
configs = {name: to_json(item) for name, item in pipeline.configs.items()}
names = {name: tensor_names(item).to_json()["sources"] for name, item in pipeline.configs.items()}
print(json.dumps({"configs": configs, "names": names, "keys": keys}))
"""
"""Program that prints the config and the tensor names of every model of a recipe, and for every step the
inputs of its key except file digests."""


def copy_package(root: Path) -> Path:
    """Copies the package mlcbuild and the directory of target presets into the directory `root`, and returns
    `root`."""
    for package in ("mlcbuild", "targets"):
        shutil.copytree(ROOT / package, root / package, ignore=HALF_COMPILED)
    return root


def prospect(root: Path, recipe: Path) -> subprocess.CompletedProcess[str]:
    """Starts Python with the copy of the package mlcbuild in `root`, and prints as JSON what the keys of a
    recipe's steps are computed from. Returns the ended process, also after a failure."""
    path = os.pathsep.join([str(root), str(ROOT / "runtime")])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(recipe)],
        cwd=recipe.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(result: subprocess.CompletedProcess[str]) -> Any:
    """Returns the JSON document that a process has printed on standard output. Fails with its standard error
    if its exit code is not 0."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
