"""Adapts the number of computing threads to a machine that other processes may use, too."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW, SHORTEST, LONGEST = 0.1, 0.5, 16.0
"""WINDOW is the number of seconds of computing between two measurements of the CPU time that the threads got.
SHORTEST and LONGEST are the minimum and maximum pause, in seconds, before more threads are tried again. A
failed attempt costs one slow step, which may take a second."""
SHARE = 0.7
"""Minimum ratio of the CPU time that the computing threads used to their number times the wall time. Below it
the process competes for cores and uses fewer threads. `ci/bench/busy` measures the effect."""
REST = 8.0
"""Ratio of a pause to the trial before it: after a trial of more computing threads has failed, the next trial
begins no earlier than this many times the failed trial's duration, but 16 s (LONGEST) at most."""
IDLE = 0.5
"""Seconds without a step of the model after which other processes may have taken the cores: the next step
begins with no more threads than there are free cores, if the system reports these."""
DOUBT = 60.0
"""Seconds since the last change of the number of computing threads after which more are tried even if the
system reports too few free cores for them."""

Clock = Callable[[], float]


class Meter:
    """Measures the wall time and the CPU time of steps of the model."""

    def __init__(self, now: Clock, spent: Clock) -> None:
        """Creates a meter of the times of steps of the model, whose sums begin at 0. now: function that
        returns the present time; spent: function that returns the CPU time of this process; both in seconds.
        """
        self.now, self._spent = now, spent
        self._began, self._before = 0.0, 0.0
        self.wall, self.cpu = 0.0, 0.0
        """Wall seconds and CPU seconds of the steps of the model since the last call of `reset`."""

    def start(self) -> float:
        """Starts measuring the wall time and the CPU time of one step of the model; returns the present time
        in seconds."""
        self._began, self._before = self.now(), self._spent()
        return self._began

    def stop(self) -> float:
        """Ends measuring one step of the model, and adds its wall time and its CPU time to the two sums;
        returns the present time in seconds."""
        ended = self.now()
        self.wall += ended - self._began
        self.cpu += self._spent() - self._before
        return ended

    def reset(self) -> None:
        self.wall = self.cpu = 0.0


class Workers:
    """Chooses the number of threads that compute a step.

    The threads of a step meet at a barrier after every kernel, hundreds of times for a token. When one of
    them has to wait for a core, all wait, and two threads can be a hundred times slower than one. So when the
    process got less than SHARE of the CPU time that its threads could have used, it continues with half as
    many. More are tried after a pause, which grows with each failed trial. Where the system reports free
    cores, they are checked after an idle period and before a trial, so that no slow step is needed. Results
    do not depend on the number of threads.
    """

    def __init__(
        self,
        most: int,
        use: Callable[[int], None],
        now: Clock,
        spent: Clock,
        free: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        """Creates the object that chooses how many threads compute; the number begins at the maximum, `most`.

        use: function that is called with each new number, but not with the first, and sets it; now, spent:
        functions that return the present time, and the CPU time of this process, in seconds; free: function
        that returns the number of idle cores, or None if the system does not report it. The argument of
        `free` is the number of cores that are needed: counting may stop there.
        """
        self.count, self._most, self._use, self._free = most, most, use, free
        self._meter = Meter(now, spent)
        self._pause, self._until, self._trying = SHORTEST, 0.0, False
        self._ended, self._changed = -2 * IDLE, 0.0

    @classmethod
    def of(cls, most: int, use: Callable[[int], None], free: Callable[[int], int | None]) -> Workers:
        return cls(most, use, time.perf_counter, time.process_time, free)

    @property
    def settled(self) -> bool:
        """Returns True if the present number of threads can be trusted, so that each thread is expected to
        get a core of its own: the last step of the model ended at most IDLE (0.5) seconds ago, and no larger
        number is being tried."""
        return not self._trying and self._meter.now() - self._ended <= IDLE

    def __enter__(self) -> None:
        began = self._meter.start()
        if began - self._ended > IDLE:
            # What other processes took before the idle period says nothing about the cores now.
            self._meter.reset()
            if self.count > 1:
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
        is_trial, self._trying = self._trying, False
        if slow:  # Weights may have been read from a disk: then the next trial succeeds.
            if is_trial:
                self._pause = min(LONGEST, max(4 * self._pause, REST * wall))
            self._set(self.count // 2, trying=False)
            self._until = self._meter.now() + self._pause
        elif self.count == self._most:
            self._pause = SHORTEST
        elif self._meter.now() >= self._until:
            more = min(self._most, 2 * self.count)
            if self._meter.now() - self._changed < DOUBT and self._fitting(more) < more:
                self._until = self._meter.now() + SHORTEST
            else:
                self._set(more, trying=True)

    def _fitting(self, count: int) -> int:
        """Returns the largest of the numbers of threads `count`, `count` / 2, ... for which each thread has a
        free core, at least 1; `count` itself if the system does not report free cores."""
        if (free := self._free(count)) is not None:
            while count > max(1, free):
                count //= 2
        return count

    def _set(self, count: int, trying: bool) -> None:
        self._trying = trying
        if count != self.count:
            self.count, self._changed = count, self._meter.now()
            self._use(count)
