"""Hands requests from any thread to the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from mlcbuild_format.errors import EngineError, RequestError, StoppingError

from mlcbuild_runtime.engine.sequence import Sequence


class Intake:
    """The queue through which requests reach the engine's thread. Any thread may call its methods, except
    `get` and `received`, which only the engine calls."""

    def __init__(self, max_waiting: int, interrupt: Callable[[], None]) -> None:
        """Creates an empty queue. max_waiting: maximum number of requests that wait for admission; further
        ones are refused with RequestError (503). interrupt: function that ends a burst of decode steps after
        the current step, so that the engine reads the queue."""
        self.max_waiting, self._interrupt = max_waiting, interrupt
        self._queue: SimpleQueue[Sequence | None] = SimpleQueue()
        self.closed, self.draining, self._door = False, False, threading.Lock()
        self._submitted = self._received = 0

    def submit(
        self, sequence: Sequence, waiting: Callable[[], int], announce: Callable[[int, Sequence], None]
    ) -> None:
        """Puts a request into the queue. Raises EngineError if the engine is stopped, and RequestError (503)
        if too many requests wait, or if the engine is stopping and the request is not a later part of one
        that is being answered.

        waiting: function that returns the number of requests that wait for admission, those in this queue
        included; announce: function that is called with the request's number (the count of earlier requests)
        and the request, before the engine's thread can see it.
        """
        with self._door:
            if self.closed:
                raise EngineError("the engine is stopped")
            if self.draining and not sequence.request.continues:
                raise StoppingError
            if waiting() >= self.max_waiting:
                raise RequestError(
                    f"{self.max_waiting} requests are waiting already: try again later",
                    code="overloaded",
                    status=503,
                )
            announce(self._submitted, sequence)
            self._submitted += 1
            self._put(sequence)

    def wake(self) -> None:
        """Ends a running burst of decode steps after the current step and makes the engine's thread read its
        queue, so that it notices changes by other threads, such as a cancelled request."""
        self._put(None)

    def drain(self) -> None:
        """Makes the queue refuse new requests; requests that are in it, and later parts of them, are still
        served."""
        with self._door:
            self.draining = True

    def close(self) -> None:
        with self._door:
            self.closed = True
            self._put(None)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    @property
    def pending(self) -> int:
        """Returns the number of requests that the engine has not taken from the queue yet."""
        return self._submitted - self._received

    def get(self, wait: bool, timeout: float | None) -> Sequence | None:
        """Returns the next request of the queue, with its order of arrival set; None if the engine was only
        woken. wait: True to wait until the queue has an entry, up to `timeout` seconds or without limit for
        None. Raises queue.Empty if it has none."""
        sequence = self._queue.get(wait, timeout)
        if sequence is not None:
            sequence.order = self._received
        return sequence

    def received(self) -> None:
        """Records that the request which `get` returned last no longer waits in the queue: the engine now
        counts it among its running and waiting requests."""
        self._received += 1

    def _put(self, item: Sequence | None) -> None:
        self._queue.put(item)
        self._interrupt()
