"""Tests of calls that run in daemon threads: the order of their results, the number of threads, and how they
end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import pytest

from mlcbuild.remotes.background import AbandonedError, Background, within


def fail() -> int:
    raise ZeroDivisionError("no")


def test_results_come_in_order() -> None:
    with Background(3) as pool:
        assert pool.all([partial(pow, i, 2) for i in range(20)]) == [i * i for i in range(20)]
        with pytest.raises(ZeroDivisionError, match="no"):
            pool.all([lambda: 1, fail])
        assert pool.submit(lambda: 5).result(60) == 5, "a failure ends no thread"


def test_threads_are_started_as_they_are_needed() -> None:
    gate = threading.Event()
    with Background(2) as pool:
        pool.submit(lambda: 1).result(60)
        calls = [pool.submit(lambda: gate.wait(60)) for _ in range(5)]
        assert len(pool._threads) <= 2
        gate.set()
        assert all(call.result(60) for call in calls)
        assert len(pool._threads) == 2 and all(thread.daemon for thread in pool._threads)


def test_the_end_cancels_what_has_not_begun_and_waits_for_nobody() -> None:
    gate, begun = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return gate.wait(60)

    pool = Background(1)
    running, waiting = pool.submit(hang), pool.submit(lambda: 1)
    assert begun.wait(60)
    pool.close()
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(60)
    with pytest.raises(CancelledError):
        pool.submit(lambda: 1).result(60)
    assert not running.done()
    gate.set()
    assert running.result(60) is True


def test_a_pool_waits_a_moment_for_its_threads() -> None:
    with Background(2) as pool:
        pool.submit(lambda: time.sleep(0.01)).result(60)
        threads = list(pool._threads)
    assert threads and not any(thread.is_alive() for thread in threads)


def test_a_call_has_a_limit_of_time() -> None:
    gate = threading.Event()
    assert within(60, lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        within(60, fail).result()
    with pytest.raises(AbandonedError, match="it took too long") as caught:
        within(0.01, lambda: gate.wait(60))
    assert not caught.value.future.done() and isinstance(caught.value, TimeoutError)
    gate.set()
    assert caught.value.future.result(60) is True
