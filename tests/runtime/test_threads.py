"""Tests of the lock that engines take in turn, and of the threads that tasks use again."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest
from mlcbuild_runtime.engine.threads import Task, Turns


def waiting(turns: Turns, count: int) -> None:
    """Waits until `count` threads wait for their turn to compute. Fails after 120 seconds."""
    end = time.monotonic() + 120
    while len(turns._waiting) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def one_turn(turns: Turns) -> None:
    with turns:
        pass


def test_turns_go_to_the_thread_that_has_waited_longest() -> None:
    turns, order, threads = Turns(), SimpleQueue[int](), list[threading.Thread]()

    def work(number: int) -> None:
        with turns:
            order.put(number)

    with turns:
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            waiting(turns, number + 1)
    for thread in threads:
        thread.join(120)
    assert [order.get(timeout=120) for _ in range(4)] == [0, 1, 2, 3]


def test_whoever_waits_is_announced_to_the_turn_that_runs() -> None:
    turns, calls = Turns(), list[str]()
    other = threading.Thread(target=one_turn, args=(turns,))
    with turns:
        turns.on_wait(lambda: calls.append("arrival"))
        assert not calls
        other.start()
        waiting(turns, 1)
        assert calls == ["arrival"]
        turns.on_wait(lambda: calls.append("waits already"))
        assert calls == ["arrival", "waits already"]
    other.join(120)


def test_the_end_of_a_turn_forgets_its_callback() -> None:
    turns, calls = Turns(), list[str]()
    with turns:
        turns.on_wait(lambda: calls.append("first"))
    with turns:
        other = threading.Thread(target=one_turn, args=(turns,))
        other.start()
        waiting(turns, 1)
    other.join(120)
    assert not calls


def test_a_task_s_thread_is_used_again() -> None:
    actual = SimpleQueue[int]()
    for _ in range(3):
        task = Task(lambda: actual.put(threading.get_ident()))
        assert not task.is_alive()
        task.start()
        task.join(120)
        assert not task.is_alive() and task.work is None
    assert len({actual.get(timeout=120) for _ in range(3)}) == 1


@pytest.mark.parametrize("error", [RuntimeError, BaseException])
def test_the_thread_of_a_task_that_fails_executes_the_next_one(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Checks an ordinary exception, and one that is not, like the panics of Rust libraries."""

    def fail() -> None:
        raise error("no")

    actual = SimpleQueue[str]()
    for work in (fail, lambda: actual.put("next")):
        task = Task(work)
        task.start()
        task.join(120)
        assert not task.is_alive()
    assert actual.get(timeout=120) == "next"
    assert "the work of a thread has failed" in caplog.text
