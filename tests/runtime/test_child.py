"""Tests of child processes: their answers, all the ways in which they can end, and that no process is left
over."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import SetupError, StoppingError
from mlcbuild_runtime.text import child as children
from mlcbuild_runtime.text.child import Child, EndedError, StartingError

from . import shared

MODULE = "echo_child"
LONG = shared.WAIT


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the directory of this file on the import path for one test, so that child processes can import
    test modules from it, such as echo_child."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def child() -> Iterator[Child]:
    process = Child(MODULE, "echoes")
    yield process
    process.end()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_ended(*pids: int) -> None:
    deadline = time.monotonic() + LONG
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_process_answers_line_by_line(child: Child) -> None:
    first: Any = child.ask({"a": "é\n"}, LONG)
    second: Any = child.ask([1, None], LONG)
    assert first["document"] == {"a": "é\n"} and second["document"] == [1, None]
    assert first["pid"] == second["pid"] != os.getpid()


def test_large_answers_arrive_whole(child: Child) -> None:
    assert child.ask({"large": 5 << 20}, LONG) == "x" * (5 << 20)


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_is_replaced(child: Child, code: int) -> None:
    first: Any = child.ask({}, LONG)
    with pytest.raises(EndedError) as caught:
        child.ask({"end": code}, LONG)
    assert caught.value.code == code
    second: Any = child.ask({}, LONG)
    assert second["pid"] != first["pid"]


def test_a_process_whose_server_has_ended_is_silent(child: Child, capfd: pytest.CaptureFixture[str]) -> None:
    child.ask({}, LONG)
    process = child.process
    assert process is not None and process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write(b"{}\n")
    process.stdin.flush()
    assert process.wait(LONG) == 0
    assert capfd.readouterr().err == ""


def test_a_python_error_is_a_fault_of_the_installation(child: Child) -> None:
    with pytest.raises(SetupError, match=r"^the process that echoes has failed: see the lines above$"):
        child.ask({"end": 1}, LONG)


def test_a_process_that_takes_too_long_is_killed(child: Child) -> None:
    first: Any = child.ask({}, LONG)
    with pytest.raises(EndedError) as caught:
        child.ask({"hang": True}, 0.05)
    assert caught.value.code is None
    until_ended(first["pid"])
    assert child.ask({}, LONG)


def test_the_forks_of_a_process_end_with_it(child: Child) -> None:
    pids: Any = child.ask({"fork": True}, LONG)
    child.end()
    until_ended(*pids)


def test_a_group_that_has_ended_may_forbid_the_signal(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the end of a process that has ended by itself, where the system answers as macOS does."""
    child.ask({}, LONG)
    assert child.process is not None
    child.process.kill()

    def forbidden(_group: int, _number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", forbidden)
    child.end()
    assert child.process is None


def test_closing_ends_a_waiting_thread_and_starts_nothing(child: Child) -> None:
    child.ask({}, LONG)
    timer = threading.Timer(0.05, child.close)
    timer.start()
    with pytest.raises(StoppingError):
        child.ask({"hang": True}, LONG)
    timer.join()
    with pytest.raises(StoppingError) as caught:
        child.ask({}, LONG)
    assert (caught.value.code, caught.value.status) == ("stopping", 503)
    assert str(caught.value) == "the server is stopping: use another server"


def test_closing_while_a_process_starts(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a process that starts while another thread calls `close` is ended."""
    start, processes = Child._started, []

    def closed_meanwhile(self: Child) -> subprocess.Popen[bytes]:
        self.close()
        processes.append(start(self))
        return processes[0]

    monkeypatch.setattr(Child, "_started", closed_meanwhile)
    with pytest.raises(StoppingError):
        child.ask({}, LONG)
    assert processes[0].poll() is not None


def test_each_process_is_greeted_before_its_first_line() -> None:
    greetings = []

    def hello() -> object:
        greetings.append("hello")
        return "hello"

    process = Child(MODULE, "echoes", hello)
    for _ in range(2):
        process.ask({}, LONG)
        process.ask({}, LONG)
        process.end()
    assert greetings == ["hello"] * 2
    process.end()


@pytest.mark.parametrize(
    ("hello", "seconds", "reason"),
    [({"hang": True}, 0.05, "was not ready within 0.05 s"), ({"end": 3}, LONG, "ended with code 3")],
)
def test_a_process_that_does_not_become_ready(
    hello: object, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "STARTING", seconds)
    process = Child(MODULE, "echoes", lambda: hello)
    with pytest.raises(StartingError) as caught:
        process.ask({}, LONG)
    assert str(caught.value) == f"the process that echoes {reason} when it started: try again later"
    assert (caught.value.code, caught.value.status) == ("overloaded", 503)
    assert process.process is None


def test_a_module_that_does_not_exist() -> None:
    process = Child("nothing", "does nothing")
    with pytest.raises(SetupError, match="the process that does nothing has failed"):
        process.ask({}, LONG)
