"""Tests that a process which the fork server starts behaves like one that `python -m` starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forkserver import PIPE_BYTES, ForkServer, needs_python


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "MLCBUILD_STORE": "a store"}


def by_python(
    module: str, *arguments: str, cwd: Path, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, **variables},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tests.mirror", ["0", "an argument"]),
        ("tests.mirror", ["3"]),
        ("tests.mirror", ["kill"]),
        ("mlcbuild", ["--version"]),
        ("mlcbuild", ["nothing"]),
    ],
)
def test_a_forked_command_is_what_python_starts(
    module: str, arguments: list[str], server: ForkServer, tmp_path: Path
) -> None:
    forked = server.run(module, arguments, tmp_path, ENVIRONMENT)
    started = by_python(module, *arguments, cwd=tmp_path)
    assert forked.stdout == started.stdout and forked.stderr == started.stderr
    assert forked.returncode == started.returncode and forked.args == started.args


@pytest.mark.parametrize("stdin", ["a line\nand ä part", "x" * PIPE_BYTES])
def test_a_forked_command_reads_what_python_reads(stdin: str, server: ForkServer, tmp_path: Path) -> None:
    forked = server.run("tests.mirror", ["0"], tmp_path, ENVIRONMENT, stdin=stdin)
    started = by_python("tests.mirror", "0", cwd=tmp_path, stdin=stdin)
    assert forked.stdout == started.stdout and json.loads(forked.stdout)["input"] == stdin


def test_a_script_is_what_python_starts(server: ForkServer, tmp_path: Path) -> None:
    """Checks that a script of the server passes on standard streams, arguments, directory, environment, exit
    code and signals, that its process ends when the script is killed, and that it starts Python where that
    makes a difference."""
    server.write_script(tmp_path / "mirror", "tests.mirror")

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "mirror", *arguments],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PWD": str(tmp_path), **variables},
            input="a line",
            capture_output=True,
            text=True,
            check=False,
        )

    for arguments in (["0", "an argument"], ["3"], ["kill"]):
        started = by_python("tests.mirror", *arguments, cwd=tmp_path, stdin="a line", PWD=str(tmp_path))
        scripted = run(*arguments)
        assert (scripted.stdout, scripted.stderr) == (started.stdout, started.stderr)
        assert scripted.returncode == started.returncode
    assert run("3", PYTHONUTF8="0").returncode == 3
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [str(tmp_path / "mirror"), "sleep"]
        with (
            Path(os.devnull).open() as nothing,
            subprocess.Popen(command, env=ENVIRONMENT, stdin=nothing, stdout=subprocess.PIPE) as process,
        ):
            assert process.stdout is not None and b'"arguments": ["sleep"]' in process.stdout.readline()
            process.send_signal(number)
            assert process.stdout.read() == b"", "no process has the other end any more"
        assert process.returncode == -number


def test_an_exception_ends_it_with_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    result = server.run("tests.mirror", ["error"], tmp_path, ENVIRONMENT)
    assert result.returncode == 1 and result.stderr.startswith("Traceback")
    assert result.stderr.endswith("KeyError: 'error'\n")


def test_one_that_takes_too_long_is_ended(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.run("tests.mirror", ["sleep"], tmp_path, ENVIRONMENT, timeout=1)
    assert server.run("tests.mirror", ["0"], tmp_path, ENVIRONMENT).returncode == 0


def test_python_starts_where_its_own_variables_differ() -> None:
    assert not needs_python({**os.environ, "MLCBUILD_STORE": "a store", "PYTHONPATH": "elsewhere"})
    assert needs_python({**os.environ, "PYTHONHASHSEED": "7"})
    assert needs_python({**os.environ, "LC_ALL": "de_DE.ISO-8859-1"})
