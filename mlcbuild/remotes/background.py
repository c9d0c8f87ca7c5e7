"""Runs calls in daemon threads, so that neither an interrupt nor the end of the process waits for a call that
hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

_JOIN = 1.0
"""Maximum seconds for which leaving a pool's context waits for its threads."""
Result = TypeVar("Result")


class Background:
    """A pool of up to `most` daemon threads. Leaving it as a context manager cancels calls that have not
    started, and waits at most one second for the others, which may hang.

    `concurrent.futures.ThreadPoolExecutor` does not suit, because the interpreter joins its threads at
    exit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending: set[Future[object]] = set()
        self._guard = threading.Lock()
        self._closed = False

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queues a call for a thread of the pool, and returns its future, which is cancelled if the pool is
        closed already.
        """
        future: Future[Result] = Future()
        with self._guard:
            if self._closed:
                future.cancel()
                return future
            self._pending.add(future)  # type: ignore[arg-type]
            self._tasks.put((future, call))  # type: ignore[arg-type]
            if len(self._threads) < min(self._most, len(self._pending)):
                thread = threading.Thread(target=self._work, name="remote", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def all(self, calls: Iterable[Callable[[], Result]]) -> list[Result]:
        """Runs several calls in the threads of the pool, in parallel as far as its threads suffice, and
        returns their results in order. If calls fail, raises the exception of the first of them in that
        order; calls after it may then still run. Raises CancelledError for a call that `close` cancelled."""
        futures = [self.submit(call) for call in calls]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Closes the pool: cancels the calls that no thread has started yet, and all that are submitted
        later; running calls continue."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending)
            for _ in self._threads:
                self._tasks.put(None)
        for future in pending:
            future.cancel()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        end = time.monotonic() + _JOIN
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                _settle(future, call)
            with self._guard:
                self._pending.discard(future)
            del task, future, call  # An idle thread must not keep the last call's objects alive.


def within(seconds: float, call: Callable[[], Result]) -> Future[Result]:
    """Runs a call without a timeout parameter, such as a DNS lookup, in a daemon thread for at most
    `seconds`.

    Returns the completed future, which holds the call's result or its exception, or raises AbandonedError, a
    TimeoutError; the call then continues unobserved.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(future, call), name="remote", daemon=True).start()
    if not wait((future,), seconds).done:
        raise AbandonedError(future)
    return future


class AbandonedError(TimeoutError):
    """The error for a call that exceeded its time limit. `future` will receive the call's result if the
    call ends.
    """

    def __init__(self, future: Future[Any]) -> None:
        super().__init__("it took too long")
        self.future = future


def _settle(future: Future[Result], call: Callable[[], Result]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
