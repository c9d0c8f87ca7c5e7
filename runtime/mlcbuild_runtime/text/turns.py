"""A lock for work that only one thread may do at a time, which serves the newest request first.

When requests arrive faster than they are served, a queue in order of arrival makes everyone wait for its
whole length, and a client that sends many makes it long. Serving the newest first serves most requests at
once and the rest late (the policy is known as adaptive LIFO): a client waits for the running work and for
later requests, never for a backlog. When the queue is full, the request that has waited longest is refused.
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
    """A request is refused because it waited longest in a full queue, or reached its time limit."""


class NewestFirst:
    """A lock with a bounded queue that serves the newest thread first."""

    def __init__(self, most: int) -> None:
        """`most`: maximum threads that may wait."""
        self._most, self._lock, self._taken = most, threading.Lock(), False
        self._waiting: deque[Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that wait for the lock."""
        return len(self._waiting)

    @contextmanager
    def turn(self, seconds: float | None = None) -> Iterator[None]:
        """Waits up to `seconds` for the lock and holds it while the context is open. Raises CrowdedError."""
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
        """Takes the lock and returns None, or returns a future that is set when the lock is free."""
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
                    newest = None  # its time limit has passed
            self._taken = newest is not None
        if newest is not None:
            newest.set_result(None)


def in_nice_thread(niceness: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in a thread that yields the cores to others on a busy machine."""
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
