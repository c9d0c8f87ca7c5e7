"""Tracks the state of every step of a run, and the transitions between states.

The loop in execute.py starts and ends steps. This module computes the consequences for the steps that depend
on them: their keys become known, they become ready, are reused, or are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from math import inf

from mlcbuild.build.events import Noted, Reporter, StepFinished, StepResult
from mlcbuild.build.graph import Step
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.resources import Running
from mlcbuild.build.schedule import LockWait, Options, outputs, weights
from mlcbuild.build.usage import Notes
from mlcbuild.build.worker import remarks, tail
from mlcbuild.signals import Interruption


class StepState(Enum):
    """The states of a step in a run. Each value describes what the step waits for."""

    PENDING = "an input without a result"
    READY = "cores and memory"
    LOCKED = "the process that builds the same key"
    FETCHING = "files of its inputs, which come from a remote"
    RUNNING = "the end of its action"
    ARRIVING = "its own files, which come from a remote"
    DONE = "nothing: it has a result"


_PENDING, _READY, _LOCKED, _FETCHING, _RUNNING, _ARRIVING, _DONE = StepState

TRANSITIONS: Mapping[StepState, frozenset[StepState]] = {
    _PENDING: frozenset((_READY, _FETCHING, _ARRIVING, _DONE)),
    _READY: frozenset((_PENDING, _LOCKED, _FETCHING, _RUNNING, _DONE)),
    _LOCKED: frozenset((_PENDING, _READY, _DONE)),
    _FETCHING: frozenset((_PENDING, _READY, _DONE)),
    _RUNNING: frozenset((_ARRIVING, _DONE)),
    _ARRIVING: frozenset((_PENDING, _READY, _FETCHING, _DONE)),
    # Needed when a remote has the record of a reused step, but cannot send a file that another step reads.
    _DONE: frozenset((_PENDING, _READY, _FETCHING)),
}


@dataclass(slots=True)
class TrackedStep:
    """The state of one step during a run. Only `Tracker` changes it."""

    step: Step
    place: int
    """Index of the step in the plan, from 0."""
    planned: Planned
    state: StepState = StepState.PENDING
    missing: frozenset[str] = frozenset()
    """Names of the inputs that have no result yet, for a step that waits for them."""
    remote: Planned | None = None
    """The step's plan if a remote cache has its result: it names the remote and the record. None if no remote
    has it, so that the result's files must be in this store.
    """
    requests: frozenset[int] = frozenset()
    """Identifiers of the running downloads for which the step waits."""
    lock_wait: LockWait | None = None
    running: Running | None = None
    """The cores and memory that the step holds while it runs; None for a step that does not run."""
    built_elsewhere: StepResult | None = None
    """The step's result from a cluster worker that has another store; kept until the result's files are on
    this machine."""
    result: StepResult | None = None
    chain: float = inf
    """Seconds from the step's start to the end of the longest chain of steps after it, estimated from earlier
    step records.
    """

    @property
    def name(self) -> str:
        return self.step.name


class Tracker:
    """The states of all steps of one run. fetch_all: function that starts the download of all files of a
    step's result; it is called once the step's state is ARRIVING.
    """

    def __init__(
        self, planner: Planner, notes: Notes, options: Options, report: Reporter, end: Interruption
    ) -> None:
        self.steps: dict[str, TrackedStep] = {}
        """Name of a step -> the step with its state, in the order of the plan."""
        self.outputs = outputs(planner, options)
        self.stopping = ""
        """The reason why no more steps are started; "" while steps are started."""
        self.fetch_all: Callable[[str], None] = lambda name: None
        self._planner = planner
        self._notes = notes
        self._report = report
        self._keep_going = options.keep_going
        self._end = end
        self._ready: list[tuple[float, int, str]] = []
        """Heap of (minus the seconds from a step's start to the end of the longest chain of steps after it,
        index of the step in the plan, its name), for steps that were ready. Entries of steps that are not
        READY any more are skipped.
        """
        self._by_state: dict[StepState, dict[str, TrackedStep]] = {state: {} for state in StepState}
        self._plan()

    def _plan(self) -> None:
        """Sets the initial state of every step of the run from the step's plan."""
        for place, planned in enumerate(self._notes.plan()):
            step = self._planner.graph.step(planned.name)
            item = self.steps[planned.name] = TrackedStep(step, place, planned)
            self._by_state[_PENDING][item.name] = item
            needs_files = item.name in self.outputs
            if planned.state == "remote":
                item.remote = planned
            if planned.state == "hit" or (planned.state == "remote" and not needs_files):
                self._finish(item, _reused(planned))
        chains = weights(self._planner.graph, {item.name: item.planned for item in self.left()})
        for name, seconds in chains.items():
            self.steps[name].chain = seconds
        for item in tuple(self.left()):
            if item.planned.state == "run":
                self.enqueue(item)
            elif item.planned.state == "remote":
                self.move(item, _ARRIVING)
            else:
                item.missing = self._missing(item)

    # States

    def move(self, item: TrackedStep, state: StepState) -> None:
        """Changes the state of a step to one that TRANSITIONS allows after the present one."""
        assert state in TRANSITIONS[item.state], f"{item.name}: {item.state.name} -> {state.name}"
        del self._by_state[item.state][item.name]
        self._by_state[state][item.name] = item
        item.state = state

    def enqueue(self, item: TrackedStep) -> None:
        """Marks a step as ready to start, or as waiting if files are being downloaded for it."""
        self.move(item, _FETCHING if item.requests else _READY)
        if item.state is _READY:
            heappush(self._ready, (-item.chain, item.place, item.name))

    def in_state(self, state: StepState) -> tuple[TrackedStep, ...]:
        return tuple(self._by_state[state].values())

    def left(self) -> Iterator[TrackedStep]:
        """Yields the steps that have no result yet, in the order of the plan."""
        return (item for item in self.steps.values() if item.state is not _DONE)

    @property
    def queued(self) -> int:
        """Returns the number of steps that are ready and wait for free cores and memory."""
        return len(self._ready)

    @property
    def is_complete(self) -> bool:
        return len(self._by_state[_DONE]) == len(self.steps)

    @property
    def is_running(self) -> bool:
        return bool(self._by_state[_RUNNING])

    def start_ready(self, start: Callable[[TrackedStep], bool], is_open: Callable[[], bool]) -> None:
        """Passes ready steps to `start` while `is_open()` is True, those with the longest chains first.

        start: starts a step and returns True, or returns False for a step that does not fit now and stays
        ready.
        """
        remaining = []
        while self._ready and is_open():
            entry = heappop(self._ready)
            item = self.steps[entry[2]]
            if item.state is _READY and not start(item):
                remaining.append(entry)
        for entry in remaining:
            heappush(self._ready, entry)

    def results(self) -> dict[str, StepResult]:
        return {name: item.result for name, item in self.steps.items() if item.result is not None}

    # Results

    def settle(self, result: StepResult) -> None:
        """Sets the result of a step and updates all steps that depend on it, which may become ready, reused
        or skipped.
        """
        pending = [result]
        while pending:
            result = pending.pop()
            item = self.steps[result.name]
            if item.state is _DONE:
                continue  # The step was skipped already because of another input.
            self._finish(item, result)
            self._report(StepFinished(result, tail(result.log) if result.status == "failed" else ""))
            for remark in remarks(result.log) if result.status == "built" else ():
                self._report(Noted(f"{result.name}: {remark}"))
            if result.status == "failed" and not self._keep_going:
                self.stopping = f"not started: {result.name} failed"
            if result.record is not None:
                self._planner.results[result.name] = result.record
            if not self._end.reason:
                users = (self.steps.get(name) for name in self._planner.graph.users[result.name])
                pending += [
                    later
                    for user in users
                    if user is not None and result.name in user.missing
                    for later in self._advance(user, result)
                ]

    def _finish(self, item: TrackedStep, result: StepResult) -> None:
        self.move(item, _DONE)
        item.result = result
        item.missing = frozenset()

    def _advance(self, item: TrackedStep, need: StepResult) -> list[StepResult]:
        """Updates a pending build step after another step, whose files it reads, has ended with the result
        `need`.

        Returns the step's result in a list if it is skipped or reused, or [] if it still waits or is ready
        to run.
        """
        if need.record is None:
            reason = f"needs {need.name}, which failed" if need.status == "failed" else need.reason
            return [StepResult(item.name, "skipped", reason=reason)]
        item.missing -= {need.name}
        if item.missing:
            return []
        planned, before = self._notes.consider(item.step), item.planned
        if planned.state == "run" and planned.key == before.key:
            planned = before  # This keeps the reason that its files could not be downloaded.
        item.planned = planned
        if planned.state == "remote" and planned.record is not None:
            item.remote = planned
            self._planner.results[item.name] = planned.record
            if item.name in self.outputs:
                self.move(item, _ARRIVING)
                self.fetch_all(item.name)
                return []
        if planned.state in ("hit", "remote"):
            return [_reused(planned)]
        self.enqueue(item)
        return []

    # Files of remotes

    def arrived(self, item: TrackedStep) -> None:
        """Sets the result of a step whose files have been downloaded from a remote cache."""
        if item.remote is not None and item.state is _ARRIVING:
            self.settle(item.built_elsewhere or _reused(item.remote))

    def demote(self, item: TrackedStep, why: str) -> None:
        """Makes a step run after all although its result was to be reused, because the result's files could
        not be downloaded. why: the reason, for messages. Steps that waited for the files then wait for the
        run.
        """
        planned, item.remote = item.remote, None
        if planned is None:
            return  # Another failed download has done this before.
        item.result = None
        item.planned = replace(planned, state="run", reason=f"its files cannot be fetched: {why}")
        if planned.key is not None:
            self._planner.sharing.forget(planned.key)
        for name in self._planner.graph.users[item.name]:
            user = self.steps.get(name)
            if user is None or user.state in (_RUNNING, _DONE, _ARRIVING):
                continue
            user.missing |= {item.name}
            if user.state is not _PENDING:
                self.move(user, _PENDING)
        item.missing = self._missing(item)
        if item.missing:
            self.move(item, _PENDING)
        else:
            self.enqueue(item)

    def _missing(self, item: TrackedStep) -> frozenset[str]:
        """Returns the names of a step's inputs that have no step record yet."""
        needs = (self.steps.get(name) for name in self._planner.graph.needs(item.step))
        return frozenset(
            need.name
            for need in needs
            if need is not None and need.state is not _DONE and need.planned.state != "remote"
        )


def _reused(planned: Planned) -> StepResult:
    return StepResult(planned.name, "reused", planned.key, reason=planned.reason, record=planned.record)
