"""Tests of runs that are interrupted, of closed output streams, full disks and terminals."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import IO, Any

import pytest

from mlcbuild.build.events import RunResult, Status
from mlcbuild.cli.build import listed
from mlcbuild.outcomes import Result, VariantResult
from tests.conftest import checked, mlcbuild
from tests.forkserver import ForkServer, Process

pytestmark = pytest.mark.xdist_group("streams")  # so that one process has the fork server
BUFFERED = {"PYTHONUNBUFFERED": ""}
SERVER = ForkServer(variables=BUFFERED)
"""The fork server of these tests, whose processes buffer their output."""
UNSET = ("CI", "NO_COLOR", "COLUMNS", "MLCBUILD_DEBUG")


def environment(store: Path, **variables: str) -> dict[str, str]:
    """Returns the environment variables for a separate process that uses this store."""
    outer = {name: value for name, value in os.environ.items() if name not in UNSET}
    ours = {"MLCBUILD_STORE": str(store), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    return {**outer, **BUFFERED, **ours, **variables}


@pytest.fixture(scope="module", autouse=True)
def ended_server() -> Iterator[None]:
    """Ends the fork server after the last test."""
    yield
    SERVER.close()


@contextmanager
def started(place: Path, store: Path, errors: IO[bytes], *more: str) -> Iterator[tuple[Process, IO[str]]]:
    """Yields (`mlcbuild run` as a separate process, its standard output). The process is ended at the end of
    the block. errors: file for its standard error."""
    reading, writing = os.pipe()
    words = ["run", "recipe.yaml", *more]
    process = SERVER.start("mlcbuild", words, place, environment(store), writing, errors=errors)
    os.close(writing)
    with os.fdopen(reading) as output, process:
        try:
            yield process, output
        finally:
            process.kill()


@pytest.mark.parametrize("executor", ["processes", "inline"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_built(
    place: Path, tmp_path: Path, executor: str, number: signal.Signals
) -> None:
    store = tmp_path / "store"
    words = ("--only", "library/*/q0f32/host", "--executor", executor)
    with (tmp_path / "errors").open("w+b") as file, started(place, store, file, *words) as (process, output):
        for line in output:
            if line.startswith("start   library/"):
                break
        process.send_signal(number)
        rest, errors = output.read(), (tmp_path / "errors").read_text()
        assert process.wait() == 130, rest + errors
    last = rest.splitlines()[-1]
    assert last.startswith(f"interrupted by {number.name}: 1 built, 0 reused, ")
    assert "stopped: library/" in last
    assert last.endswith("What was built is kept; run again to continue")
    assert "Traceback" not in rest + errors
    plan = json.loads(checked(mlcbuild("plan", "recipe.yaml", "--json", store=store, cwd=place)))
    assert {item["name"] for item in plan["steps"] if item["status"] == "hit"} == {"config/tiny"}
    checked(mlcbuild("cache", "verify", store=store))


def test_variants_that_an_interrupted_run_did_not_reach_have_no_lines() -> None:
    no_product: Any = None
    no_log: Any = None
    every: tuple[Status, ...] = ("built", "skipped", "failed")
    variants = tuple(VariantResult(no_product, status) for status in every)
    for interrupted, statuses in (("SIGINT", ["built", "failed"]), ("", [*every])):
        result = Result(variants, RunResult((), 1.0, interrupted), no_log)
        assert [item.status for item in listed(result)] == statuses


def test_a_reader_that_leaves_early_is_no_error_but_ends_a_run(place: Path, tmp_path: Path) -> None:
    def without_reader(*command: str) -> tuple[int, str]:
        reading, writing = os.pipe()
        os.close(reading)
        errors = tmp_path / "errors"
        there = environment(tmp_path)
        with errors.open("wb") as file:
            process = SERVER.start("mlcbuild", command, place, there, writing, errors=file)
        os.close(writing)
        with process:
            return process.wait(), errors.read_text()

    assert without_reader("schema") == (0, "")
    assert without_reader("models") == (0, "")
    assert without_reader("run", "recipe.yaml", "--only", "config/tiny", "--executor", "inline") == (1, "")


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("models >&-", 0, ""),
        ("nope >&-", 2, "mlcbuild: 'nope' is not a verb; "),
        ("nope 2>&-", 2, ""),
        ("models <&-", 0, ""),
        ("run recipe.yaml --only config/tiny --executor inline >&- <&-", 0, ""),
    ],
)
def test_closed_streams(place: Path, tmp_path: Path, command: str, code: int, stderr: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f"{shlex.quote(sys.executable)} -m mlcbuild {command}"],
        cwd=place,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code
    assert result.stderr.startswith(stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["models", "schema"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_below_stdout(tmp_path: Path, command: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "mlcbuild", command],
            env=environment(tmp_path, PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.endswith(" written: No space left on device\n")
    assert len(result.stderr.splitlines()) == 1


def on_a_terminal(columns: int, place: Path, store: Path, **variables: str) -> tuple[int, str]:
    """Returns (exit code, text) of a short run on a terminal of `columns` columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, columns, 0, 0))
    words = ["run", "recipe.yaml", "--only", "config/tiny", "--executor", "inline"]
    there = environment(store, TERM="xterm-256color", **variables)
    process = SERVER.start("mlcbuild", words, place, there, theirs, errors=theirs, stdin=theirs)
    os.close(theirs)
    observed = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        observed += part
    os.close(ours)
    with process:
        return process.wait(), observed.decode()


@pytest.mark.parametrize("columns", [0, 10, 200])
def test_a_terminal_of_any_width(place: Path, tmp_path: Path, columns: int) -> None:
    code, observed = on_a_terminal(columns, place, tmp_path)
    assert code == 0, observed
    assert "\x1b[" in observed, "the live view moves the cursor"
    flat = observed.replace("\r", "").replace("\n", "")
    assert "config/tiny in" in flat
    assert "1 built, 0 reused in" in flat


def test_lines_on_a_terminal_in_ci(place: Path, tmp_path: Path) -> None:
    code, observed = on_a_terminal(80, place, tmp_path, CI="true")
    assert code == 0
    assert "\x1b[" not in observed
    assert observed.startswith("start   config/tiny (never built)")
