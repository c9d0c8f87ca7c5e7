"""Tests of the runtime in an environment that has nothing but the runtime and its dependencies.

It is a new virtual environment without pip, whose site-packages directory holds links to these distributions
of the present environment, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from . import shared


def closure() -> set[str]:
    """Returns the names of the runtime's dependencies, direct and indirect, as far as they apply to this
    system."""
    project = tomllib.loads((shared.ROOT / "runtime" / "pyproject.toml").read_text())["project"]
    names_read: set[str] = set()
    pending = list(project["dependencies"])
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in names_read:
            names_read.add(name)
            pending += distribution(name).requires or []
    return names_read


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a virtual environment that has only the runtime and its dependencies, and returns the path of
    its Python interpreter."""
    root = tmp_path_factory.mktemp("isolated")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = root.glob("lib/python*/site-packages")
    for name in closure():
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    for package in ("mlcbuild_format", "mlcbuild_runtime"):
        (site / package).symlink_to(shared.ROOT / "runtime" / package)
    return root / "bin" / "python"


def environment(**extra: str) -> dict[str, str]:
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TVM_", "MLCBUILD"))
    }
    return {**keep, **extra}


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=python.parent,
        check=False,
        timeout=shared.WAIT,
    )


def test_the_builder_and_its_tools_are_not_there(python: Path) -> None:
    program = (
        "from importlib.util import find_spec\n"
        "for name in ('tvm', 'torch', 'transformers', 'mlcbuild', 'safetensors', 'networkx', 'dask'):\n"
        "    print(name, find_spec(name))\n"
    )
    result = run(python, "-c", program)
    assert result.returncode == 0, result
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["None"] * 7


def test_it_serves_a_bundle(python: Path, tiny_bundle: Path) -> None:
    command = [str(python), "-W", "error", "-m", "mlcbuild_runtime", str(tiny_bundle), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=python.parent
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[5]
            body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=shared.WAIT).json()
            assert reply["choices"][0]["message"]["content"]
            process.terminate()
            assert process.wait(shared.WAIT) == 0
        finally:
            process.kill()


def test_a_bundle_without_a_tvm_runtime_says_what_to_do(
    python: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "tiny"))
    shutil.rmtree(copy / "lib")
    (copy / "bundle.json").chmod(0o644)
    document = json.loads((copy / "bundle.json").read_bytes())
    document["files"] = {
        name: file for name, file in document["files"].items() if not name.startswith("lib/")
    }
    (copy / "bundle.json").write_text(json.dumps(document))
    result = run(python, "-m", "mlcbuild_runtime", str(copy), "--port", "0")
    assert result.returncode == 3
    assert re.fullmatch(
        r"mlcbuild-serve: .*: the bundle brings no TVM runtime \(lib/libtvm_runtime\.\w+\) and this machine"
        r" has none: set MLCBUILD_TVM_RUNTIME to a libtvm_runtime\.\w+ of version [\d.a-z]+\n",
        result.stderr,
    )


def test_the_chat_works(python: Path, tiny_bundle: Path) -> None:
    program = "import sys; from mlcbuild_runtime.chat import chat; sys.exit(chat(sys.argv[1]))"
    result = subprocess.run(
        [str(python), "-c", program, str(tiny_bundle)],
        input="What is 2 + 3?\n",
        capture_output=True,
        text=True,
        env=environment(),
        cwd=python.parent,
        check=False,
        timeout=shared.WAIT,
    )
    assert result.returncode == 0, result
    assert result.stdout.strip()
