"""Tests of the commands for installing in README.md at the top of the checkout. Each is run with a copy of
the checkout and in a new environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

LINES = re.findall(
    r"tests/test_install\.py runs them -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)[0].splitlines()
every = pytest.mark.skipif(
    not os.environ.get("MLCBUILD_TEST_EVERY"), reason="installs packages: set MLCBUILD_TEST_EVERY"
)


def test_every_tool_has_a_line() -> None:
    assert [line.split()[0] for line in LINES] == ["pip", "pip", "uv", "pipx"]
    assert all("./runtime ." in line or "--find-links wheels" in line for line in LINES)


@pytest.mark.parametrize("project", [".", "runtime"])
def test_wheels_say_what_they_are(project: str) -> None:
    """Checks the metadata and the files that an index and type checkers read."""
    root = ROOT / project
    described = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert described["license"] == "Apache-2.0" and described["license-files"] == ["LICENSE"]
    assert (root / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= {*described["classifiers"]}
    assert described["keywords"] and (root / described["readme"]).is_file()
    packages = {entry.partition(".")[0] for entry in described["scripts"].values()}
    assert all((root / package / "py.typed").is_file() for package in packages)


@every
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", [LINES[0], LINES[2], LINES[3]])
def test_a_line_installs_the_program(tmp_path: Path, line: str) -> None:
    checkout, environment = tmp_path / "checkout", tmp_path / "environment"
    ignored = shutil.ignore_patterns(".*", "tests", "results")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    places = {"HOME": tmp_path, "UV_TOOL_BIN_DIR": tmp_path / "bin", "PIPX_BIN_DIR": tmp_path / "bin"}
    variables = {**os.environ, **{name: str(place) for name, place in places.items()}}
    variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
    tool = line.split(maxsplit=1)[0]
    lines = [line] if tool == "pip" else [f"pip install {tool}", LINES[1], line]
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=checkout, env=variables, check=True)
    programs = environment / "bin" if tool == "pip" else tmp_path / "bin"
    for program in ("mlcbuild",) if tool != "pip" else ("mlcbuild", "mlcbuild-serve", "mlcbuild-chat"):
        shown = subprocess.run([programs / program, "--version"], capture_output=True, text=True, check=True)
        assert re.fullmatch(rf"{program} \d+\.\d+\.\d+\n", shown.stdout)
