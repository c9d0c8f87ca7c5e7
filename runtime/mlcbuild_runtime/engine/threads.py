"""Runs engines on reusable threads, and provides the lock that lets one engine compute at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


def _ignore() -> None:
    """Does nothing. It is the interrupt callback of an engine whose work cannot be ended early."""


class Turns:
    """A fair lock: it goes to the thread that has waited longest.

    Engines of one process share it: two models that compute at once would have twice as many threads as there
    are cores, and both would be slower than in turns. A plain lock would go back to the engine that just had
    it. `FairLock` in `text/turns.py` serves clients, of which each may have many threads, and may refuse one;
    this lock refuses nobody, and reports to its holder that another engine waits.
    """

    def __init__(self) -> None:
        self._lock, self._busy = threading.Lock(), False
        self._waiting: deque[threading.Lock] = deque()
        self._on_wait: Callable[[], None] = _ignore

    def __enter__(self) -> None:
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
            self._on_wait()
        gate.acquire()

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Registers a function for as long as this engine holds the lock. It is called, possibly from another
        thread, each time that another engine begins to wait for the lock, and at once if one waits already.
        It must not use this lock."""
        with self._lock:
            self._on_wait = callback
            if self._waiting:
                callback()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._on_wait = _ignore
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._busy = False


class Task:
    """A task: a function that runs once on a daemon thread, which does not keep the process alive. A thread
    is used again for later tasks, because TVM keeps the workers of every thread that has ever used it. An
    exception of the function is only logged."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self._started, self.ended = False, threading.Event()

    def start(self) -> None:
        self._started = True
        with _lock:
            inbox = _idle.pop() if _idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=_work_for_ever, args=(inbox,), name="engine", daemon=True).start()
        inbox.put(self)

    def is_alive(self) -> bool:
        return self._started and not self.ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)


_lock = threading.Lock()
_idle: list[SimpleQueue[Task]] = []
"""The queues of those threads that wait for a task; a new task is put into one of them before another thread
is started."""


def _work_for_ever(inbox: SimpleQueue[Task]) -> None:
    while True:
        task = inbox.get()
        assert task.work is not None
        try:
            task.work()
        except BaseException:  # A panic of a Rust library is no Exception; the thread must survive.
            log.exception("the work of a thread has failed")
        task.work = None  # A reference here would keep a model in memory.
        with _lock:
            _idle.append(inbox)
        task.ended.set()
        del task
