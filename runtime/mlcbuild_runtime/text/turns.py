"""Turns at work that only one thread may do at a time, the newest request first.

Where requests come faster than they are done, a queue in order of arrival makes everyone wait for as long as
it is, and whoever sends many makes it long. The newest first serves most requests at once and the rest late
(the policy is known as adaptive LIFO): a client waits for the work that is going on and for what came after
it, but never for a backlog. Where the queue is full, the request that has waited longest is refused.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class CrowdedError(Exception):
    """A request has waited longest in a full queue, or as long as it may."""


class NewestFirst:
    """A lock with a bounded queue."""

    def __init__(self, most: int) -> None:
        """`most`: threads that may wait."""
        self._most, self._lock, self._taken = most, threading.Lock(), False
        self._waiting: deque[Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._waiting)

    @contextmanager
    def turn(self, seconds: float | None = None) -> Iterator[None]:
        """Waits for the lock, `seconds` at most, and holds it. Raises CrowdedError."""
        mine = self._enter()
        try:
            if mine is not None:
                mine.result(seconds)
        except TimeoutError:
            if mine is not None and mine.cancel():
                raise CrowdedError from None
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> Future[None] | None:
        """Returns None with the lock taken, or what is set when it is."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return None
            mine = Future[None]()
            self._waiting = deque(each for each in self._waiting if not each.cancelled())
            self._waiting.append(mine)
            oldest = self._waiting.popleft() if len(self._waiting) > self._most else None
        if oldest is not None and oldest.set_running_or_notify_cancel():
            oldest.set_exception(CrowdedError())
        return mine

    def _leave(self) -> None:
        newest = None
        with self._lock:
            while self._waiting and newest is None:
                newest = self._waiting.pop()
                if not newest.set_running_or_notify_cancel():
                    newest = None  # it has waited as long as it may
            self._taken = newest is not None
        if newest is not None:
            newest.set_result(None)


def in_nice_thread(niceness: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns, from a thread that yields the cores to others where they are busy."""
    result = Future[T]()

    def run() -> None:
        if sys.platform == "linux":  # elsewhere the whole process would be nice
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
