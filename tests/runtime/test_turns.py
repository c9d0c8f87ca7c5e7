"""Tests of the lock that serves clients in turn, and of doing work in a thread of lower priority."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from mlcbuild_runtime.text.turns import CrowdedError, FairLock, client, in_nice_thread


def test_turns_are_given_in_order_of_arrival() -> None:
    turns, order = FairLock(3), list[str]()

    def work(name: str) -> None:
        with turns.turn():
            order.append(name)

    with ThreadPoolExecutor(4) as pool:
        with turns.turn():
            waiting = []
            for count, name in enumerate(["oldest", "older", "newest"]):
                waiting.append(pool.submit(work, name))
                while turns.waiting < count + 1:
                    time.sleep(0.001)
            with pytest.raises(CrowdedError):  # the queue is full: those who wait keep their places
                work("refused")
        assert [each.exception() for each in waiting] == [None, None, None]
    assert order == ["oldest", "older", "newest"]
    with turns.turn(), ThreadPoolExecutor(1) as pool, pytest.raises(CrowdedError):
        pool.submit(turns.turn(0.01).__enter__).result()  # it waits no longer than it may
    with turns.turn():
        assert turns.waiting == 0


def test_an_early_request_is_served_while_others_keep_coming() -> None:
    """Checks that a request is served although other clients send their next request as soon as they have an
    answer: nobody is overtaken twice by the same client."""
    turns, order = FairLock(8), list[int]()
    started = threading.Barrier(5)

    def client(number: int) -> None:
        started.wait()
        for _ in range(50):
            with turns.turn():
                order.append(number)
                while turns.waiting < 4 and len(order) <= 200:
                    time.sleep(0.0001)  # until all others wait

    with ThreadPoolExecutor(5) as pool:
        assert [each.exception() for each in [pool.submit(client, number) for number in range(5)]] == [
            None
        ] * 5
    rounds = [order[start : start + 5] for start in range(5, 200, 5)]
    assert all(sorted(turn) == [0, 1, 2, 3, 4] for turn in rounds), order


class _Queue:
    """A lock with a bounded queue, and threads of several clients that are put into this queue one after the
    other; `order` records the order in which they hold the lock."""

    def __init__(self, places: int, pool: ThreadPoolExecutor) -> None:
        self.turns, self.order = FairLock(places), list[str]()
        self._pool = pool

    def enter(self, name: str, address: str, delay: float = 0.0) -> Future[None]:
        """Starts a thread of the client `address` that waits for the lock under test. Returns its future once
        the thread is in the lock's queue, or was refused because the queue is full."""
        before = self.turns.waiting
        future = self._pool.submit(self._work, name, address, delay)
        while self.turns.waiting == before and not future.done():
            time.sleep(0.001)
        return future

    def _work(self, name: str, address: str, delay: float = 0.0) -> None:
        client.set(address)
        with self.turns.turn(delay=delay):
            self.order.append(name)


def test_clients_take_turns() -> None:
    """Checks the order in which threads hold the lock: clients, distinguished by address, take turns,
    although one of them enqueues four threads before two others enqueue one or two."""
    with ThreadPoolExecutor(8) as pool:
        queue = _Queue(8, pool)
        with queue.turns.turn():
            names = [
                ("a1", "a"),
                ("a2", "a"),
                ("a3", "a"),
                ("a4", "a"),
                ("b1", "b"),
                ("c1", "c"),
                ("b2", "b"),
            ]
            waiting = [queue.enter(*name) for name in names]
        assert [each.exception() for each in waiting] == [None] * 7
    assert queue.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_delayed_thread_lets_later_ones_of_its_client_go_first() -> None:
    with ThreadPoolExecutor(8) as pool:
        queue = _Queue(5, pool)
        with queue.turns.turn():
            names = [("a1", "a", 50), ("a2", "a", 90), ("b1", "b", 50), ("a3", "a", 0)]
            waiting = [queue.enter(*name) for name in names]
            waiting.append(queue.enter("b2", "b"))
            last = queue._pool.submit(queue._work, "c1", "c")
            assert isinstance(waiting[1].exception(60), CrowdedError), "the last of the longest queue"
        assert [each.exception() for each in (last, waiting[0], *waiting[2:])] == [None] * 5
    assert queue.order == ["a3", "b2", "c1", "a1", "b1"]


def test_a_full_queue_has_room_for_further_clients() -> None:
    """Checks a full queue: the client with the most waiting threads loses its newest one to a client with
    fewer; a client with as many is refused."""
    with ThreadPoolExecutor(8) as pool:
        queue = _Queue(4, pool)
        with queue.turns.turn():
            waiting = {name: queue.enter(name, "a") for name in ("a1", "a2", "a3", "a4")}
            entered = pool.submit(queue._work, "b1", "b")
            assert isinstance(waiting["a4"].exception(60), CrowdedError)
            assert isinstance(queue.enter("a5", "a").exception(60), CrowdedError)
            second = pool.submit(queue._work, "b2", "b")
            assert isinstance(waiting["a3"].exception(60), CrowdedError)
            assert isinstance(queue.enter("b3", "b").exception(60), CrowdedError), "each has two"
        assert [each.exception() for each in (entered, second)] == [None, None]
    assert queue.order == ["a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_thread_leaves_the_queue(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks Ctrl-C while a thread waits for the lock and, if `is_late`, just after it got the lock: the next
    thread gets it then."""
    turns = FairLock(1)
    holder = turns.turn()

    def interrupted(_future: Future[None], _seconds: float | None) -> None:
        if is_late:
            holder.__exit__(None, None, None)
        raise KeyboardInterrupt

    holder.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.turn():
            raise AssertionError
    if not is_late:
        assert turns.waiting == 0
        holder.__exit__(None, None, None)
    with turns.turn(0):
        assert turns.waiting == 0


def test_work_in_a_nice_thread() -> None:
    assert in_nice_thread(0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_nice_thread(0, lambda: 1 // 0)
    if sys.platform == "linux":
        before = os.getpriority(os.PRIO_PROCESS, 0)

        def niceness() -> int:
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        assert in_nice_thread(min(before + 3, 19), niceness) == min(before + 3, 19)
        assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_a_nicer_process_keeps_its_niceness() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    high = min(niceness() + 6, 19)
    assert in_nice_thread(high, lambda: in_nice_thread(high - 3, niceness)) == high


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_a_refused_niceness_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    errors = list[PermissionError]()

    def call() -> None:
        try:
            in_nice_thread(20, lambda: 7)  # 20: above the niceness of every process
        except PermissionError as error:
            errors.append(error)

    monkeypatch.setattr("os.setpriority", refuse)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(10)
    assert [error.errno for error in errors] == [errno.EACCES], "the caller waits or has no error"
