"""Threads that engines run on, the order in which they compute, and how many work on a step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

WINDOW, SHORTEST, LONGEST = 0.1, 0.5, 16.0
"""Seconds of computing after which `Workers` looks back, and that it does with fewer threads before it tries
more again: at first, and at most. A try in vain costs a step, which may take a second then."""
SHARE = 0.7
"""Of the processor time that its threads could have had: a process that gets less has to wait for others."""
REST = 8.0
"""After a try in vain no other is made for that many times as long as it took, or longer."""

IDLE = 0.5
"""Seconds without work after which nothing is known of the machine any more."""
DOUBT = 60.0
"""Seconds after which more threads are tried although the machine seems to have no cores for them."""

Clock = Callable[[], float]


def _no_hurry() -> None:
    """Nothing can be shortened."""


class Turns:
    """A lock that is handed to whoever has waited longest.

    Engines share one: two models that compute at once would have twice the threads that the machine has
    cores, and both would be slower than in turns. A plain lock would go back to the engine that just had it.
    """

    def __init__(self) -> None:
        self._lock, self._busy = threading.Lock(), False
        self._waiting: deque[threading.Lock] = deque()
        self._hurry: Callable[[], None] = _no_hurry

    def __enter__(self) -> None:
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
            self._hurry()
        gate.acquire()

    def may_hurry(self, hurry: Callable[[], None]) -> None:
        """Who has the turn may end it sooner: `hurry` is called if somebody waits, by whom it may be."""
        with self._lock:
            self._hurry = hurry
            if self._waiting:
                hurry()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._hurry = _no_hurry
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._busy = False


class Workers:
    """How many threads compute together, on a machine that may be busy with other things.

    The threads of a step wait for each other at the end of every kernel, hundreds of times for a token. Where
    one of them has to wait for a core, all do, and two threads can be a hundred times slower than one. So:
    when the process got less than SHARE of the processor time that its threads could have had, half as many
    go on alone. More are tried again after a while, and less often each time in vain. Where the system tells
    how many cores are free, nobody has to find out by a slow step: it is asked after a rest, and before more
    threads are tried. What is computed does not depend on how many compute it.
    """

    def __init__(
        self,
        most: int,
        use: Callable[[int], None],
        now: Clock,
        spent: Clock,
        free: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        """`use` sets the number of threads. `now`: seconds; `spent`: of this process, on processors; `free`:
        cores without other work, as far as so many are wanted."""
        self.count, self._most, self._use = most, most, use
        self._now, self._spent, self._free = now, spent, free
        self._began, self._before, self._wall, self._cpu = 0.0, 0.0, 0.0, 0.0
        self._pause, self._until, self._trying = SHORTEST, 0.0, False
        self._ended, self._changed = -2 * IDLE, 0.0

    @classmethod
    def of(cls, most: int, use: Callable[[int], None], free: Callable[[int], int | None]) -> Workers:
        return cls(most, use, time.perf_counter, time.process_time, free)

    @property
    def settled(self) -> bool:
        """Nothing is being tried: so many threads have found their cores."""
        return not self._trying and self._now() - self._ended <= IDLE

    def __enter__(self) -> None:
        self._began, self._before = self._now(), self._spent()
        if self.count > 1 and self._began - self._ended > IDLE:
            self._set(self._fitting(self.count), trying=False)
            self._until = self._began + WINDOW

    def __exit__(self, *_error: object) -> None:
        self._ended = self._now()
        self._wall += self._ended - self._began
        self._cpu += self._spent() - self._before
        if self._wall >= WINDOW:
            slow = self.count > 1 and self._cpu < SHARE * self.count * self._wall
            self._judge(slow, self._wall)
            self._wall = self._cpu = 0.0

    def _judge(self, slow: bool, wall: float) -> None:
        if slow:  # or weights come from a disk: then the next try succeeds
            if self._trying:
                self._pause = min(LONGEST, max(4 * self._pause, REST * wall))
            self._set(self.count // 2, trying=False)
            self._until = self._now() + self._pause
        elif self.count == self._most:
            self._pause, self._trying = SHORTEST, False
        elif self._now() >= self._until:
            more = min(self._most, 2 * self.count)
            if self._now() - self._changed < DOUBT and self._fitting(more) < more:
                self._until = self._now() + SHORTEST
            else:
                self._set(more, trying=True)

    def _fitting(self, count: int) -> int:
        """As many threads, or half as many and so on, as find a core each."""
        if (free := self._free(count)) is not None:
            while count > max(1, free):
                count //= 2
        return count

    def _set(self, count: int, trying: bool) -> None:
        self._trying = trying
        if count != self.count:
            self.count, self._changed = count, self._now()
            self._use(count)


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
