"""Defines a lock that one thread holds at a time, and for which clients are served in turn.

The threads of one client are served in order of arrival, unless some of them are delayed behind the others.
Before the next thread of a client, at most one thread of each other client is served. Where work goes through
a lock for its cheap part and then one for its expensive part, the second queue should be as long as the
first: a client that it refuses sends its request again at once, which then waits in the first queue again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Queue: TypeAlias = list[tuple[float, Future[None]]]
"""The threads of one client that wait for a lock, the next one first: (value of time.monotonic(), in seconds,
by which the thread counts as arrived, future that is set when it gets the lock)."""
client: ContextVar[str] = ContextVar("client", default="")
"""The address of the client for which the current thread or task works; "" if there is none."""


class CrowdedError(Exception):
    """The error for a thread that cannot get a lock, because the queue is full, its time limit has passed, or
    a thread of a client with fewer waiting threads has taken its place in the queue."""


class FairLock:
    """A lock with a bounded queue that serves clients in turn, and each client's threads in order of arrival.

    A thread that meets a full queue displaces the last one of the client with the most threads in it, if that
    client has at least two more than its own; otherwise it is refused. Displaced and refused threads get
    CrowdedError.
    """

    def __init__(self, most: int) -> None:
        """Creates a free lock. most: maximum number of threads that may wait for it."""
        self._most, self._lock, self._taken = most, threading.Lock(), False
        self._waiting: OrderedDict[str, Queue] = OrderedDict()
        """Address of a client -> its threads that wait for the lock. The client that is served next comes
        first."""

    @property
    def waiting(self) -> int:
        """Returns the number of threads that wait for this lock, without the one that holds it."""
        with self._lock:
            return self._count()

    @contextmanager
    def turn(self, seconds: float | None = None, delay: float = 0.0) -> Iterator[None]:
        """Waits for the lock, up to `seconds` or without limit for None, and holds it while the context is
        open. The context variable `client` names the client. delay: seconds for which threads of the same
        client that arrive later still go first. Raises CrowdedError if the queue is full, the time passes, or
        a thread of another client takes this one's place in the full queue."""
        mine = self._enter(client.get(), time.monotonic() + delay)
        if mine is not None:
            self._wait(mine, seconds)
        try:
            yield
        finally:
            self._leave()

    def _wait(self, mine: Future[None], seconds: float | None) -> None:
        """Waits until this thread holds the lock, up to `seconds` or without limit for None. Raises
        CrowdedError if the time passes or the thread has lost its place in the queue. Any other exception
        that ends the waiting, such as KeyboardInterrupt, reaches the caller; the lock then goes to the next
        thread. mine: the thread's future in the queue."""
        try:
            mine.result(seconds)
        except (TimeoutError, CancelledError):
            if mine.cancel():
                raise CrowdedError from None
        except BaseException:
            if not mine.cancel():  # The thread holds the lock already.
                self._leave()
            raise

    def _enter(self, name: str, arrival: float) -> Future[None] | None:
        """Acquires the lock and returns None if it is free. Otherwise puts the thread into the queue of the
        client `name`, and returns a future that is set when the thread holds the lock. arrival: time, on the
        clock of time.monotonic(), by which the thread's place among this client's threads is chosen. Raises
        CrowdedError if the queue is full, and no client has at least two more waiting threads than this one,
        so that its last could be removed."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return None
            if self._count() >= self._most:
                self._displace(name)
            mine = Future[None]()
            insort(self._waiting.setdefault(name, []), (arrival, mine), key=itemgetter(0))
            return mine

    def _count(self) -> int:
        """Removes the waiting threads whose time limit has passed from the queues for the lock, and returns
        the number of those that still wait. The caller must hold `_lock`."""
        for name, queue in tuple(self._waiting.items()):
            left = [(arrival, each) for arrival, each in queue if not each.cancelled()]
            if left:
                self._waiting[name] = left
            else:
                del self._waiting[name]
        return sum(map(len, self._waiting.values()))

    def _displace(self, name: str) -> None:
        """Removes the last waiting thread of the client that has the most, which gets CrowdedError, to make
        room for a thread of the client `name`. Raises CrowdedError if the other client would then have fewer
        waiting threads than this one with its new thread."""
        largest = max(self._waiting.values(), key=len, default=Queue())
        if len(largest) < len(self._waiting.get(name, ())) + 2:
            raise CrowdedError
        largest.pop()[1].cancel()

    def _leave(self) -> None:
        following = None
        with self._lock:
            while self._waiting and following is None:
                name, queue = self._waiting.popitem(last=False)
                _, following = queue.pop(0)
                if queue:
                    self._waiting[name] = queue  # The client becomes the last one.
                if not following.set_running_or_notify_cancel():
                    following = None  # The thread's time limit has passed.
            self._taken = following is not None
        if following is not None:
            following.set_result(None)


def in_nice_thread(niceness: int, work: Callable[[], T]) -> T:
    """Calls `work` in a new thread, on Linux with at least the given niceness, so that others get the cores
    first, waits, and returns its result. Exceptions of `work` are raised here, and OSError if the system
    refuses the niceness."""
    result = Future[T]()

    def run() -> None:
        try:
            if sys.platform == "linux":  # On other systems this would change the whole process.
                thread = threading.get_native_id()
                # A process under `nice` has a higher one, and lowering it needs a privilege.
                if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
                    os.setpriority(os.PRIO_PROCESS, thread, niceness)
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
