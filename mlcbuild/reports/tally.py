"""Counts the steps of a run and estimates the remaining time, from the run's events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mlcbuild.build.events import (
    Event,
    RunStarted,
    StepFetched,
    StepFetching,
    StepFinished,
    StepPlaced,
    StepProgress,
    StepStarted,
    StepWaiting,
)

ETA_FROM = 3.0
"""Minimum seconds, exclusive, that a running step is expected to take in all, or that are left of a run, for
its remaining time to be shown."""


@dataclass
class WorkRate:
    """Measures how long a running step takes for a unit of its work, such as a token, to estimate when it
    ends. Time before the step's first progress report, such as for loading a model, does not count."""

    first: int
    """Number of units of work (such as tokens) that a running step had finished at its first progress report.
    """
    since: float
    """Time of the first progress report of a running step, in seconds as time.monotonic returns it."""
    done: int = -1
    reached: float = 0.0
    """Time of the latest progress report with which the running step's number of finished units of work
    changed, in seconds as time.monotonic returns it."""

    def note(self, done: int) -> None:
        """Updates the rate at which a running step works. done: units of work that are finished now."""
        if done != self.done:
            self.done, self.reached = done, time.monotonic()

    def seconds_until(self, total: int) -> float:
        """Returns the estimated seconds from now until a running step has finished `total` units of its work
        (such as tokens), from its speed between its first and its latest report of progress. The result is
        negative if the step is later than estimated. Raises ZeroDivisionError if no unit was finished between
        these reports."""
        each = (self.reached - self.since) / (self.done - self.first)
        return each * (total - self.done) - (time.monotonic() - self.reached)


@dataclass
class Tally:
    """The number of finished steps of a run so far, and the running steps with their progress."""

    total: int = 0
    done: int = 0
    finished: set[str] = field(default_factory=set)
    """Names of the steps that are already counted as finished. A step with a second result does not count
    twice, such as one that was to be reused and runs after all because its files cannot be downloaded."""
    running: dict[str, StepStarted | StepFetching] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    progress: dict[str, StepProgress] = field(default_factory=dict)
    rates: dict[str, WorkRate] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    chains: dict[str, float] = field(default_factory=dict)
    """Name of an unfinished step -> expected seconds from the start of this step to the end of the longest
    chain of steps that depend on it."""
    places: dict[str, str] = field(default_factory=dict)
    """Name of a running step -> name of the cluster worker that runs it. Steps that run on this machine are
    absent."""

    def note(self, event: Event) -> None:
        """Updates the number of finished steps, and the state and progress of running and waiting ones, from
        one event of the run."""
        match event:
            case RunStarted():
                self.total, self.done = event.steps, event.reused
                self.finished = set(event.hits)
                self.chains = dict(event.chains)
            case StepStarted() | StepFetching():
                self.waiting.pop(event.name, None)
                self.started[event.name] = time.monotonic()
                self.running[event.name] = event
            case StepPlaced():
                self.places[event.name] = event.worker
                self.started[event.name] = time.monotonic()
            case StepProgress():
                self.progress[event.name] = event
                self.rates.setdefault(event.name, WorkRate(event.done, time.monotonic())).note(event.done)
            case StepWaiting():
                self.waiting[event.name] = event.holder
            case StepFetched():
                self._forget(event.name)
            case StepFinished():
                self.done += event.result.name not in self.finished
                self.finished.add(event.result.name)
                self.chains.pop(event.result.name, None)
                self._forget(event.result.name)
            case _:
                pass

    def _forget(self, name: str) -> None:
        for table in (self.running, self.started, self.progress, self.rates, self.waiting, self.places):
            table.pop(name, None)

    def critical(self) -> tuple[str, float]:
        """Returns (name of the step that begins the longest chain of unfinished steps, expected seconds from
        now until this chain ends); the run lasts at least as long. The seconds are negative if the chain is
        late. Returns ("", 0) if no chain is known."""
        now = time.monotonic()
        ends = {
            name: seconds - (now - self.started.get(name, now) if name in self.running else 0.0)
            for name, seconds in list(self.chains.items())
        }
        return max(ends.items(), key=lambda item: item[1], default=("", 0.0))

    def left(self, name: str) -> float | None:
        """Returns the estimated remaining seconds of a running step, from its progress or, if that is
        unknown, from its last run or, if there was none, from the usual duration of such a step. None if all
        of these are unknown, if the step is not running, takes longer than estimated, or is expected to take
        at most ETA_FROM seconds in all."""
        step = self.running.get(name)
        if step is None:
            return None
        elapsed = time.monotonic() - self.started.get(name, 0.0)
        progress = self.progress.get(name)
        estimate = step.estimate or step.typical or None if isinstance(step, StepStarted) else None
        rate = self.rates.get(name)
        if progress is not None and rate is not None and rate.first < rate.done <= progress.total:
            guess = rate.seconds_until(progress.total)
        elif estimate is not None:
            guess = estimate - elapsed
        else:
            return None
        return guess if guess > 0 and guess + elapsed > ETA_FROM else None
