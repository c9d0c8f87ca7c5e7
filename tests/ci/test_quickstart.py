"""Tests of the shell scripts in ci/: they are portable, and they report what a machine lacks."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlcbuild.cli import parser
from tests.conftest import ROOT
from tests.tour import commands


@pytest.mark.parametrize("script", ["ci/quickstart", "ci/environment", "ci/check", "ci/test"])
def test_scripts_are_portable_shell(script: str) -> None:
    assert subprocess.run(["sh", "-n", ROOT / script], check=False).returncode == 0
    assert (ROOT / script).read_text().startswith("#!/bin/sh\n")
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(("checked", "tested", "code"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (3, 5, 5)], ids=str)
def test_faults_of_style_fail_the_tests_beside_which_they_are_looked_for(
    checked: int, tested: int, code: int, tmp_path: Path
) -> None:
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "test", tmp_path / "ci")
    (tmp_path / "ci" / "environment").write_text(f"echo {tmp_path}/python\n")
    (tmp_path / "ci" / "check").write_text(f"echo style; exit {checked}\n")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\ncase "$*" in -c*) echo 4;; *) echo "$@"; exit {tested};; esac\n'
    )
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", tmp_path / "ci" / "test", "tests/a b.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == [
        "-m pytest --numprocesses=4 --dist=loadgroup tests/a b.py",
        "style",
    ]
    assert done.stderr == ("ci/check found faults of style or types: see above\n" if checked else "")


def environment_with(programs: dict[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script `ci/environment` on a PATH with no other programs than `programs`, and returns the
    ended process, also after a failure. programs: name -> lines of a shell script that stands for the
    program."""
    place = directory / "programs"
    place.mkdir()
    for name, lines in programs.items():
        (place / name).write_text(f"#!/bin/sh\n{lines}\n")
        (place / name).chmod(0o755)
    sh = shutil.which("sh")
    assert sh is not None
    return subprocess.run(
        [sh, ROOT / "ci" / "environment", ".venv"],
        cwd=directory,
        env={"PATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "complaint"),
    [
        ({}, "Python 3.11 or newer is missing: install it"),
        ({"python3": "exit 1", "ld": ""}, "Python 3.11 or newer is missing: install it"),
        ({"python3": 'case "$2" in *venv*) exit 1;; esac'}, "Python's venv module is missing: install it"),
        ({"python3": ""}, "A linker is missing: install one"),
    ],
)
def test_what_a_machine_lacks_is_said(tmp_path: Path, programs: dict[str, str], complaint: str) -> None:
    done = environment_with(programs, tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith(complaint)
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_quickstart_builds_and_its_advice_is_right(
    tmp_path: Path, tiny_bundles: Path, common_store: Path
) -> None:
    """Checks that ci/quickstart builds bundles and that the commands which it recommends work. The script
    that would create an environment is replaced by one that names the present environment."""
    checkout, bin_ = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "recipes", checkout / "recipes", ignore=shutil.ignore_patterns("dist"))
    (checkout / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "quickstart", checkout / "ci")
    environment = {**commands(bin_), "MLCBUILD_STORE": str(common_store)}
    (bin_ / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (bin_ / "python").chmod(0o755)
    (checkout / "ci" / "environment").write_text(f"echo {shlex.quote(str(bin_ / 'python'))}\n")
    done = subprocess.run(
        [checkout / "ci" / "quickstart"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built, _, advice = done.stdout.partition("\nNow try:\n")
    assert built.splitlines()[-1].endswith("; 3 bundles in recipes/dist")
    lines = [shlex.split(line) for line in advice.splitlines()]
    assert [words[1] for words in lines] == ["chat", "serve", "inspect"]
    for words in lines:
        parsed = parser().parse_args(words[1:])
        (bundle,) = parsed.bundles if words[1] == "serve" else [parsed.bundle]
        assert (Path(bundle) / "bundle.json").is_file()
        assert Path(words[0]) == bin_ / "mlcbuild"
    inspect = subprocess.run(lines[-1], env=environment, capture_output=True, text=True, check=True)
    assert inspect.stdout.startswith("name       tiny-q4a8_1-host\n")
