"""How many threads compute together on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW, SHORTEST, LONGEST = 0.1, 0.5, 16.0
"""Seconds: of computing after which `Workers` measures, and of the pause before more threads are tried again,
at first and at most. A try in vain costs a step, which may take a second then."""
SHARE = 0.7
"""Minimum share of the processor time that the threads could have had: a process that gets less has to wait
for others."""
REST = 8.0
"""After a try in vain the next one comes no sooner than this many times its duration."""
IDLE = 0.5
"""Seconds without a step after which earlier measurements count no more."""
DOUBT = 60.0
"""Seconds after which more threads are tried even though the machine seems to have no cores for them."""

Clock = Callable[[], float]


class Meter:
    """Measures the time and the processor time of steps."""

    def __init__(self, now: Clock, spent: Clock) -> None:
        """now: the time in seconds. spent: processor seconds of this process."""
        self.now, self._spent = now, spent
        self._began, self._before = 0.0, 0.0
        self.wall, self.cpu = 0.0, 0.0
        """Seconds of the steps since `reset`."""

    def start(self) -> float:
        """Returns the time."""
        self._began, self._before = self.now(), self._spent()
        return self._began

    def stop(self) -> float:
        """Returns the time."""
        ended = self.now()
        self.wall += ended - self._began
        self.cpu += self._spent() - self._before
        return ended

    def reset(self) -> None:
        self.wall = self.cpu = 0.0


class Workers:
    """Chooses the number of threads that compute a step.

    The threads of a step wait for each other at the end of every kernel, hundreds of times for a token. Where
    one of them has to wait for a core, all do, and two threads can be a hundred times slower than one. So
    when the process got less than SHARE of the processor time that its threads could have had, half as many
    continue. More are tried again after a while, and less often after each try in vain. Where the system
    reports how many cores are free, no slow step is needed: this is read after a pause and before more
    threads are tried. Results do not depend on the number of threads.
    """

    def __init__(
        self,
        most: int,
        use: Callable[[int], None],
        now: Clock,
        spent: Clock,
        free: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        """use: sets the number of threads. now: the time in seconds. spent: processor seconds of this
        process. free: cores without other work, counted up to its argument; None if unknown."""
        self.count, self._most, self._use, self._free = most, most, use, free
        self._meter = Meter(now, spent)
        self._pause, self._until, self._trying = SHORTEST, 0.0, False
        self._ended, self._changed = -2 * IDLE, 0.0

    @classmethod
    def of(cls, most: int, use: Callable[[int], None], free: Callable[[int], int | None]) -> Workers:
        return cls(most, use, time.perf_counter, time.process_time, free)

    @property
    def settled(self) -> bool:
        """No number of threads is being tried: the present one is known to have cores."""
        return not self._trying and self._meter.now() - self._ended <= IDLE

    def __enter__(self) -> None:
        began = self._meter.start()
        if self.count > 1 and began - self._ended > IDLE:
            self._set(self._fitting(self.count), trying=False)
            self._until = began + WINDOW

    def __exit__(self, *_error: object) -> None:
        meter = self._meter
        self._ended = meter.stop()
        if meter.wall >= WINDOW:
            slow = self.count > 1 and meter.cpu < SHARE * self.count * meter.wall
            self._judge(slow, meter.wall)
            meter.reset()

    def _judge(self, slow: bool, wall: float) -> None:
        if slow:  # or weights come from a disk: then the next try succeeds
            if self._trying:
                self._pause = min(LONGEST, max(4 * self._pause, REST * wall))
            self._set(self.count // 2, trying=False)
            self._until = self._meter.now() + self._pause
        elif self.count == self._most:
            self._pause, self._trying = SHORTEST, False
        elif self._meter.now() >= self._until:
            more = min(self._most, 2 * self.count)
            if self._meter.now() - self._changed < DOUBT and self._fitting(more) < more:
                self._until = self._meter.now() + SHORTEST
            else:
                self._set(more, trying=True)

    def _fitting(self, count: int) -> int:
        """Returns `count`, or half of it and so on, so that each thread has a free core."""
        if (free := self._free(count)) is not None:
            while count > max(1, free):
                count //= 2
        return count

    def _set(self, count: int, trying: bool) -> None:
        self._trying = trying
        if count != self.count:
            self.count, self._changed = count, self._meter.now()
            self._use(count)
