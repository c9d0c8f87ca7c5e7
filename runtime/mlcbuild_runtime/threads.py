"""Threads that engines run on, and the order in which they compute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue


class Turns:
    """A lock that is handed to whoever has waited longest.

    Engines share one: two models that compute at once would have twice the threads that the machine has
    cores, and both would be slower than in turns. A plain lock would go back to the engine that just had it.
    """

    def __init__(self) -> None:
        self._lock, self._busy = threading.Lock(), False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._busy = False


class Task:
    """Work that runs on a thread of its own, as a daemon thread does. Its thread is used again after its end:
    TVM keeps the workers of every thread that has ever used it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self._started, self.ended = False, threading.Event()

    def start(self) -> None:
        self._started = True
        with _lock:
            place = _idle.pop() if _idle else None
        if place is None:
            place = SimpleQueue()
            threading.Thread(target=_work_for_ever, args=(place,), name="engine", daemon=True).start()
        place.put(self)

    def is_alive(self) -> bool:
        return self._started and not self.ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)


_lock = threading.Lock()
_idle: list[SimpleQueue[Task]] = []
"""Where threads wait that have nothing to do."""


def _work_for_ever(place: SimpleQueue[Task]) -> None:
    while True:
        task = place.get()
        assert task.work is not None
        try:
            task.work()
        finally:
            task.work = None  # nothing here keeps a model
            with _lock:
                _idle.append(place)
            task.ended.set()
            del task
