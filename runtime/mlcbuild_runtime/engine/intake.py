"""Requests on their way from any thread to the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from mlcbuild_format.errors import EngineError, RequestError

from mlcbuild_runtime.engine.sequence import Sequence


class Intake:
    """A queue of requests with a door: after `close` nothing comes in. Its methods may be called from any
    thread; `get` is for the engine's."""

    def __init__(self, max_waiting: int, interrupt: Callable[[], None]) -> None:
        """max_waiting: requests that may wait for a place. interrupt: ends the steps that run, so that the
        engine looks at the queue."""
        self.max_waiting, self._interrupt = max_waiting, interrupt
        self._queue: SimpleQueue[Sequence | None] = SimpleQueue()
        self.closed, self.draining, self._door = False, False, threading.Lock()
        self._submitted = self._received = 0

    def submit(
        self, sequence: Sequence, waiting: Callable[[], int], announce: Callable[[int, Sequence], None]
    ) -> None:
        """Puts a request into the queue.

        waiting: returns the number of requests that wait for a place. announce: called with the request's
        number before the engine can see it.
        Raises EngineError after `close`, RequestError (503) while the server is full or stopping.
        """
        with self._door:
            if self.closed:
                raise EngineError("the engine is stopped")
            if self.draining:
                raise RequestError("the server is stopping: try another", code="stopping", status=503)
            if waiting() >= self.max_waiting:
                raise RequestError(
                    f"{self.max_waiting} requests are waiting already: try later",
                    code="overloaded",
                    status=503,
                )
            announce(self._submitted, sequence)
            self._submitted += 1
            self._put(sequence)

    def wake(self) -> None:
        """Makes the engine look at what other threads have changed, such as a cancelled request."""
        self._put(None)

    def drain(self) -> None:
        """Refuses further requests; those that were submitted go on."""
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
        """Requests that the engine has not taken from the queue yet."""
        return self._submitted - self._received

    def get(self, wait: bool, timeout: float | None) -> Sequence | None:
        """Returns the next request with its order of arrival; None after `wake`. Raises Empty."""
        sequence = self._queue.get(wait, timeout)
        if sequence is not None:
            sequence.order = self._received
        return sequence

    def received(self) -> None:
        """Notes that the request from `get` counts among the engine's own now."""
        self._received += 1

    def _put(self, item: Sequence | None) -> None:
        self._queue.put(item)
        self._interrupt()
