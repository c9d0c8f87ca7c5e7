"""The loop that carries a plan out: what may run, when, and what became of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Literal

from mlcbuild import machine
from mlcbuild.errors import StoreError
from mlcbuild.events import (
    Reporter,
    RunFinished,
    RunResult,
    RunStarted,
    StepFinished,
    StepResult,
    StepStarted,
    StepWaiting,
    Warned,
    silent,
)
from mlcbuild.executors import Executor, Inline, Pool
from mlcbuild.graph import Graph, Source, Step
from mlcbuild.locks import Lock
from mlcbuild.plan import Planned, Planner
from mlcbuild.signals import caught
from mlcbuild.staging import Session, remove_tree
from mlcbuild.store import Store
from mlcbuild.worker import Given, Job, Outcome

_TICK = 0.5
"""Seconds after which workers are looked at though nothing was heard."""
_POLL = 0.1
"""Seconds between two looks at a step that another process builds."""
_TAIL_BYTES, _TAIL_LINES = 8192, 20
_SAVE_SECONDS = 2.0


@dataclass(frozen=True)
class Options:
    """How to run. Zero means: what this machine has."""

    jobs: int = 0
    """Cores to share out among steps."""
    memory: int = 0
    """Bytes to share out among steps."""
    keep_going: bool = False
    force: tuple[str, ...] = ()
    """Names or globs of steps to run whatever the store holds."""
    only: tuple[str, ...] = ()
    """Names or globs of the steps wanted; () means all."""
    executor: Literal["pool", "inline"] = "pool"


def execute(
    graph: Graph, store: Store, options: Options | None = None, report: Reporter = silent
) -> RunResult:
    """Builds what the plan lacks and returns what became of every step.

    A failed step is in the result, not an exception; so is SIGINT or SIGTERM, which ends running steps
    at once and keeps every published one. Running again goes on from there. Raises UsageError for an
    unknown name, SourceError for an unreadable source, StoreError when the store cannot be used at all.
    """
    options = options or Options()
    started = time.monotonic()
    force, only = graph.match(options.force), graph.match(options.only)
    planner = Planner(graph, store, force=force, only=only, report=report)
    run = _Run(planner, options, report)
    run.begin()
    if run.left:
        with ExitStack() as stack:
            run.open(stack)
            run.loop()
    result = run.result(time.monotonic() - started)
    report(RunFinished(result))
    return result


@dataclass
class _Running:
    step: Step
    planned: Planned
    lock: Lock
    cores: int
    log: Path
    area: Path | None = None
    started: float = field(default_factory=time.monotonic)


class _Run:
    def __init__(self, planner: Planner, options: Options, report: Reporter) -> None:
        self.planner = planner
        self.graph = planner.graph
        self.store = planner.store
        self.options = options
        self.report = report
        self.results: dict[str, StepResult] = {}
        self.left: set[str] = set()
        """Steps without a result."""
        self.missing: dict[str, int] = {}
        """Pending step -> how many of its inputs are not known."""
        self.ready: list[tuple[float, int, str]] = []
        """Heap of (-seconds of work that hang on it, place in the plan, step)."""
        self.plans: dict[str, Planned] = {}
        self.blocked: dict[str, float] = {}
        """Step whose key is locked -> when to look again."""
        self.locked: dict[str, float] = {}
        """Step whose key is or was locked -> since when."""
        self.announced: set[str] = set()
        self.running: dict[str, _Running] = {}
        self.free_cores = options.jobs or machine.cores()
        self.free_memory = options.memory or machine.memory()
        self.stopping = ""
        """Why no more steps are started."""
        self.interrupted = ""
        self.stopped: tuple[str, ...] = ()
        self.saved = time.monotonic()

    # Setting up

    def begin(self) -> None:
        """Settles what is known from the start."""
        self.places = {step.name: place for place, step in enumerate(self.planner.steps)}
        for planned in self.planner.all():
            if planned.state == "hit":
                self._reuse(planned)
            else:
                self.left.add(planned.name)
                self.plans[planned.name] = planned
        self.weights = self._weights()
        for name in self.left:
            if self.plans[name].state == "run":
                self._enqueue(self.plans[name])
            else:
                needs = self.graph.needs(self.graph.step(name))
                self.missing[name] = sum(need in self.left for need in needs)
        self._warn()
        self.report(RunStarted(len(self.planner.steps), len(self.results)))

    def _weights(self) -> dict[str, float]:
        """Seconds, by the last records, from the start of a step to the end of the longest chain after it."""
        weights: dict[str, float] = {}
        for step in reversed(self.planner.steps):
            if step.name in self.left:
                after = max((weights.get(user, 0.0) for user in self.graph.users[step.name]), default=0.0)
                weights[step.name] = after + (_estimate(self.plans[step.name]) or 1.0)
        return weights

    def open(self, stack: ExitStack) -> None:
        inline = self.options.executor == "inline"
        self.session: Session = stack.enter_context(self.store.session())
        self.executor: Executor = Inline() if inline else Pool(self.free_cores)
        stack.callback(self._finish)
        self.wake = stack.enter_context(caught(self._interrupt, inline))

    def _interrupt(self, name: str) -> None:
        self.interrupted = self.interrupted or name

    def _finish(self) -> None:
        self.executor.close()
        for running in self.running.values():
            running.lock.release()
        self._remember()

    # The loop

    def loop(self) -> None:
        try:
            while not self.interrupted and (self.running or (self.left and not self.stopping)):
                self._start_ready()
                for message in self.executor.messages(self._patience(), self.wake):
                    if isinstance(message, Outcome):
                        self._end(message)
                    else:
                        self.report(message)
                self._warn()
                if time.monotonic() - self.saved > _SAVE_SECONDS:
                    self._remember()
        except KeyboardInterrupt:
            self.interrupted = self.interrupted or "SIGINT"
        self.stopped = tuple(self.running)
        reason = f"interrupted by {self.interrupted}" if self.interrupted else self.stopping
        for name in sorted(self.left, key=self.places.__getitem__):
            self._settle(StepResult(name, "skipped", self.plans[name].key, reason=reason))

    def _patience(self) -> float:
        if not self.blocked:
            return _TICK
        return min(_TICK, max(0.0, min(self.blocked.values()) - time.monotonic()))

    def _start_ready(self) -> None:
        now = time.monotonic()
        for name in [name for name, when in self.blocked.items() if when <= now]:
            del self.blocked[name]
            self._enqueue(self.plans[name])
        later = []
        while self.ready and not self.stopping and not self.interrupted and self._has_core():
            item = heappop(self.ready)
            step = self.graph.step(item[2])
            if self.running and step.memory > self.free_memory:
                later.append(item)
            else:
                self._try_start(step)
        for item in later:
            heappush(self.ready, item)

    def _has_core(self) -> bool:
        return not self.running or (self.free_cores > 0 and len(self.running) < self.executor.capacity)

    def _try_start(self, step: Step) -> None:
        planned = self.plans[step.name]
        key = planned.key
        assert key is not None  # only steps with a key are ready
        lock = self.store.try_lock(key)
        if lock is None:
            self._wait_for(step.name, key)
            return
        record = None if step.name in self.planner.force else self.store.find(key)
        if record is not None:  # somebody built it since the plan was made
            lock.release()
            self._settle(StepResult(step.name, "reused", key, reason="built meanwhile", record=record))
            return
        self._start(step, planned, lock)

    def _wait_for(self, name: str, key: str) -> None:
        now = time.monotonic()
        first = self.locked.setdefault(name, now)
        ours = any(running.planned.key == key for running in self.running.values())
        # Not at once: a process that only cleans up stale locks holds them for a moment too.
        if name not in self.announced and not ours and now - first > 2 * _POLL:
            self.announced.add(name)
            self.report(StepWaiting(name, self.store.holder(key)))
        self.blocked[name] = now + _POLL

    def _start(self, step: Step, planned: Planned, lock: Lock) -> None:
        grant = max(1, min(step.cores, self.free_cores // (len(self.ready) + 1)))
        running = _Running(step, planned, lock, grant, self.store.log(step.name))
        self.running[step.name] = running
        self.free_cores -= grant
        self.free_memory -= step.memory
        self.report(StepStarted(step.name, planned.reason, _estimate(planned), running.log))
        try:
            with self.store.writing():
                area = running.area = self.session.area()
        except StoreError as error:
            self._end(Outcome(step.name, error=error))
            return
        self.executor.start(self._job(running, area))

    def _job(self, running: _Running, area: Path) -> Job:
        step = running.step
        preimage = self.planner.preimage(step)
        return Job(
            name=step.name,
            key=running.planned.key or preimage.key(),
            preimage=preimage,
            inputs=tuple(self._given(argument, step) for argument in step.inputs),
            cores=running.cores,
            store=self.store.root,
            area=area,
            log=running.log,
            shared=step.shared,
        )

    def _given(self, argument: str, step: Step) -> Given:
        item = step.inputs[argument]
        node = self.graph[item.node]
        files = self.planner.tree(item).files
        if isinstance(node, Source):
            return Given(argument, files, node.root.absolute(), self.planner.stats[node.name])
        return Given(argument, files)

    # Results

    def _end(self, outcome: Outcome) -> None:
        running = self.running.pop(outcome.name)
        if running.area is not None:
            remove_tree(running.area)  # there still when its worker was killed
        running.lock.release()
        self.free_cores += running.cores
        self.free_memory += running.step.memory
        if outcome.fault:
            self.report(Warned(outcome.fault))
        if outcome.error is not None and not self.options.keep_going:
            self.stopping = f"not started: {outcome.name} failed"
        self._settle(
            StepResult(
                outcome.name,
                "failed" if outcome.error is not None else "built",
                running.planned.key,
                time.monotonic() - running.started,
                running.planned.reason,
                outcome.record,
                outcome.error,
                running.log,
            )
        )

    def _settle(self, result: StepResult) -> None:
        """Notes a result and, from it, whatever becomes known of the steps behind it."""
        pending = [result]
        while pending:
            result = pending.pop()
            if result.name not in self.left:
                continue  # skipped already, through another input
            self.results[result.name] = result
            self.left.discard(result.name)
            self.report(StepFinished(result, _tail(result.log) if result.status == "failed" else ""))
            if result.record is not None:
                self.planner.results[result.name] = result.record
            for user in self.graph.users[result.name]:
                if user in self.left and not self.interrupted:
                    pending += self._advance(user, result)

    def _advance(self, name: str, need: StepResult) -> list[StepResult]:
        if need.record is None:
            reason = f"needs {need.name}, which failed" if need.status == "failed" else need.reason
            return [StepResult(name, "skipped", reason=reason)]
        self.missing[name] -= 1
        if self.missing[name]:
            return []
        planned = self.plans[name] = self.planner.consider(self.graph.step(name))
        if planned.state == "hit":
            return [StepResult(name, "reused", planned.key, record=planned.record)]
        self._enqueue(planned)
        return []

    def _enqueue(self, planned: Planned) -> None:
        name = planned.name
        heappush(self.ready, (-self.weights[name], self.places[name], name))

    def _reuse(self, planned: Planned) -> None:
        self.results[planned.name] = StepResult(planned.name, "reused", planned.key, record=planned.record)

    def _warn(self) -> None:
        for sentence in self.store.take_warnings():
            self.report(Warned(sentence))

    def _remember(self) -> None:
        self.saved = time.monotonic()
        keys = {name: step.key for name, step in self.results.items() if step.record is not None and step.key}
        self.store.cache.remember(keys)
        self.store.cache.save()

    def result(self, seconds: float) -> RunResult:
        """Called once, at the end."""
        self._remember()
        for step in self.results.values():
            if step.status == "reused" and step.record is not None:
                self.store.touch(step.record)
        steps = tuple(self.results[step.name] for step in self.planner.steps)
        return RunResult(steps, seconds, self.interrupted, self.stopped)


def _estimate(planned: Planned) -> float | None:
    """Seconds that the step took when it was last built."""
    try:
        return planned.record.made.measured.milliseconds / 1000 if planned.record is not None else None
    except ValueError:
        return None


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
