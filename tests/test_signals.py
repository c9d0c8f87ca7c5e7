"""Tests of ending a run by a signal or by the caller, without a run."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from mlcbuild.signals import Bell, Cancellation, Interruption, caught


def rings(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_a_bell_rings_until_it_is_heard() -> None:
    with Bell() as bell:
        assert not rings(bell)
        bell.ring()
        bell.ring()
        assert rings(bell)
        bell.heard()
        assert not rings(bell)
        bell.heard()  # does not wait
        for _ in range(100_000):  # more than a pipe holds
            bell.ring()
        assert rings(bell)
    with pytest.raises(OSError):
        os.fstat(bell.fileno())
    bell.ring()  # after the end: nothing


def test_the_first_reason_of_an_interruption_counts() -> None:
    stops: list[None] = []
    with Bell() as bell:
        interrupt = Interruption(bell, lambda: stops.append(None))
        assert interrupt.reason == ""
        interrupt("SIGINT")
        interrupt("SIGTERM")
        assert interrupt.reason == "SIGINT" and len(stops) == 2 and rings(bell)


def test_a_cancellation_reaches_the_runs_of_now_and_later() -> None:
    cancellation, first, second, third = Cancellation(), list[str](), list[str](), list[str]()
    with cancellation.attached(first.append):
        assert cancellation.reason == "" and not first
        cancellation.cancel("enough")
        cancellation.cancel("too much")
        with cancellation.attached(second.append):
            assert second == ["enough"]
    assert first == ["enough", "enough"] and cancellation.reason == "enough"
    with cancellation.attached(third.append):
        pass
    cancellation.cancel()
    assert first == ["enough", "enough"] and second == third == ["enough"]


def test_signals_interrupt_while_the_block_runs() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    reasons: list[str] = []
    with caught(reasons.append, inline=False):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert reasons == ["SIGTERM", "SIGINT"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_action_in_this_thread_ends_with_an_exception() -> None:
    reasons: list[str] = []
    with pytest.raises(KeyboardInterrupt), caught(reasons.append, inline=True):
        signal.raise_signal(signal.SIGTERM)
    assert reasons == ["SIGTERM"]


def test_another_thread_leaves_signals_alone() -> None:
    before, inside = signal.getsignal(signal.SIGINT), list[object]()

    def run() -> None:
        with caught(lambda reason: None, inline=False):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]
