"""The loop that carries a plan out: what may run, when, and what became of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from mlcbuild.build.events import (
    Reporter,
    RunFinished,
    RunResult,
    RunStarted,
    StepFinished,
    StepPlaced,
    StepResult,
    StepStarted,
    StepWaiting,
    Uploading,
    Warned,
    silent,
)
from mlcbuild.build.graph import Graph, Step
from mlcbuild.build.input_fetch import Demand
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.resources import Capacity, Running, executor
from mlcbuild.build.schedule import Blocked, Options, estimate, outputs, weights
from mlcbuild.build.transfer import Fetched, Transfers
from mlcbuild.build.usage import Notes
from mlcbuild.build.worker import Outcome, tail
from mlcbuild.errors import SetupError, StoreError
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.signals import Bell, Cancellation, caught
from mlcbuild.store.locks import Lock
from mlcbuild.store.staging import Session, remove_tree
from mlcbuild.store.store import Store

__all__ = ["Options", "execute"]

_TICK = 0.5
"""Seconds after which workers are looked at though nothing was heard."""


def execute(
    graph: Graph,
    store: Store,
    options: Options | None = None,
    report: Reporter = silent,
    sharing: Sharing | None = None,
    cancel: Cancellation | None = None,
) -> RunResult:
    """Builds what the plan lacks and returns what became of every step.

    A failed step is in the result, not an exception. So is the end by `cancel`, or by SIGINT and SIGTERM
    when the options say so: running steps end at once, published ones are kept, and the next run goes
    on from there. What the remotes of `sharing` have is not built, and what is built is sent to them;
    nothing that they do fails a run. An exception of `report` ends the run and leaves this function. Raises
    UsageError for an unknown name, SourceError for an unreadable source, StoreError when the store cannot
    be used at all.
    """
    options = options or Options()
    started = time.monotonic()
    force, only = graph.match(options.force), graph.match(options.only)
    planner = Planner(graph, store, force=force, only=only, sharing=sharing, report=report)
    with Bell() as bell:
        run = _Run(planner, options, report, bell)
        with (cancel or Cancellation()).attached(run.interrupt):
            _carry_out(run)
    result = run.result(time.monotonic() - started)
    report(RunFinished(result))
    return result


def _carry_out(run: _Run) -> None:
    run.begin()
    if run.left or run.planner.sharing.promised():
        with ExitStack() as stack:
            run.open(stack)
            run.loop()


class _Run:
    def __init__(self, planner: Planner, options: Options, report: Reporter, bell: Bell) -> None:
        self.planner = planner
        self.graph = planner.graph
        self.store = planner.store
        self.options = options
        self.report = report
        self.results: dict[str, StepResult] = {}
        self.left: set[str] = set()
        """Steps without a result."""
        self.missing: dict[str, set[str]] = {}
        """Pending step -> those of its inputs that are not known."""
        self.demand = Demand(planner, report)
        self.ready: list[tuple[float, int, str]] = []
        """Heap of (-seconds of work that hang on it, place in the plan, step)."""
        self.plans: dict[str, Planned] = {}
        self.blocked = Blocked()
        self.running: dict[str, Running] = {}
        self.stopping = ""
        """Why no more steps are started."""
        self.interrupted = ""
        self.bell = bell
        self.stopped: tuple[str, ...] = ()
        self.not_uploaded: dict[str, tuple[str, ...]] = {}
        self.elsewhere: dict[str, StepResult] = {}
        """Results of workers with other stores."""
        self.notes = Notes(planner)

    # Setting up

    def begin(self) -> None:
        """Settles what is known from the start."""
        self.places = {step.name: place for place, step in enumerate(self.planner.steps)}
        self.outputs = outputs(self.planner, self.options)
        for planned in self.notes.plan():
            if planned.state == "remote":
                self.demand.remote[planned.name] = planned
            if planned.state == "hit" or (planned.state == "remote" and planned.name not in self.outputs):
                self.results[planned.name] = _reused(planned)
            else:
                self.left.add(planned.name)
                self.plans[planned.name] = planned
        self.weights = weights(self.graph, self.plans)
        for name in self.left:
            if self.plans[name].state == "run":
                self._enqueue(name)
            elif self.plans[name].state == "pending":
                self.missing[name] = self._unknown(name)
        self._warn()
        self.report(RunStarted(len(self.planner.steps), len(self.results), self.weights))

    def _unknown(self, name: str) -> set[str]:
        needs = self.graph.needs(self.graph.step(name))
        return {need for need in needs if need in self.left and self.plans[need].state != "remote"}

    def open(self, stack: ExitStack) -> None:
        self.session: Session = stack.enter_context(self.store.session())
        if self.options.handle_signals:
            stack.enter_context(caught(self.interrupt, self.options.executor == "inline"))
        self.executor = executor(self.options, self.planner.sharing, self.session, self.bell)
        self.capacity = Capacity(self.executor, self.options)
        self.transfers = Transfers(self.planner.sharing, self.bell.ring)
        self.demand.open(self.transfers, self.session)
        stack.callback(self._finish)
        self._refuse()
        self.transfers.resume(self.results.values())
        for name in sorted(self.left, key=self.places.__getitem__):
            if self.plans[name].state == "remote":
                self.demand.fetch_all(name)

    def _refuse(self) -> None:
        """Finds the steps that nobody can run before any is started. Raises SetupError."""
        steps = (self.graph.step(name) for name in self.left if self.plans[name].state != "remote")
        refused = self.executor.refusals(sorted(steps, key=lambda step: self.places[step.name]))
        if refused and not self.options.keep_going:
            raise SetupError("\n".join(refused.values()))
        for name, why in refused.items():
            self._settle(StepResult(name, "failed", self.plans[name].key, error=SetupError(why)))

    def interrupt(self, reason: str) -> None:
        """Has the loop return and start no step. Any thread or signal handler may call it."""
        self.interrupted = self.interrupted or reason
        self.planner.sharing.interrupt()
        self.bell.ring()

    def _finish(self) -> None:
        self.executor.close()
        self.transfers.close()
        self.not_uploaded |= self.transfers.not_uploaded
        for running in self.running.values():
            running.lock.release()
        self.notes.write(self.results)

    # The loop

    def loop(self) -> None:
        try:
            while not self.interrupted and (self.running or (self.left and not self.stopping)):
                self._start_ready()
                self._listen()
                self.notes.write_sometimes(self.results)
            if self.transfers.uploading:
                self.report(Uploading(self.transfers.uploading))
            while self.transfers.uploading and not self.interrupted:
                self._listen()
        except KeyboardInterrupt:
            if not self.interrupted:  # no handler of ours raised it
                raise
        self.stopped = tuple(self.running)
        reason = f"interrupted by {self.interrupted}" if self.interrupted else self.stopping
        for name in sorted(self.left, key=self.places.__getitem__):
            self._settle(StepResult(name, "skipped", self.plans[name].key, reason=reason))

    def _listen(self) -> None:
        for message in self.executor.messages(self.blocked.patience(_TICK), self.bell.fileno()):
            if isinstance(message, Outcome):
                self._end(message)
                continue
            if isinstance(message, StepPlaced) and message.name in self.running:
                self.running[message.name].started = time.monotonic()
            self.report(message)
        self.bell.heard()
        for told in self.transfers.messages():
            if isinstance(told, Fetched):
                self._fetched(told)
            else:
                self.report(told)
        self._warn()

    def _start_ready(self) -> None:
        for name in self.blocked.due():
            self._enqueue(name)
        later = []
        while self.ready and not self.stopping and not self.interrupted and self.capacity.open():
            item = heappop(self.ready)
            name = item[2]
            if not self._can_start(name):
                continue  # it is queued again when it can
            step = self.graph.step(name)
            if self.capacity.fits(step):
                self._try_start(step)
            else:
                later.append(item)
        for item in later:
            heappush(self.ready, item)

    def _can_start(self, name: str) -> bool:
        waits = self.missing.get(name) or self.demand.waits(name)
        return name in self.left and name not in self.running and not waits

    def _try_start(self, step: Step) -> None:
        planned = self.plans[step.name]
        key = planned.key
        assert key is not None  # only steps with a key are ready
        try:
            lock = self.store.try_lock(key)
        except StoreError as error:
            self._settle(StepResult(step.name, "failed", key, reason=planned.reason, error=error))
            return
        if lock is None:
            self._wait_for(step.name, key)
            return
        record = None if step.name in self.planner.force else self.notes.find(key)
        if record is not None:  # somebody built it since the plan was made
            lock.release()
            self._settle(StepResult(step.name, "reused", key, reason="built meanwhile", record=record))
            return
        if self.executor.here(step) and self.demand.fetch_inputs(step):
            lock.release()
            return
        self._start(step, planned, lock)

    def _wait_for(self, name: str, key: str) -> None:
        ours = any(running.planned.key == key for running in self.running.values())
        if self.blocked.add(name) and not ours:
            self.report(StepWaiting(name, self.store.holder(key)))

    def _start(self, step: Step, planned: Planned, lock: Lock) -> None:
        granted = self.capacity.take(step, len(self.ready))
        running = Running(step, planned, lock, granted, self.store.log(step.name))
        self.running[step.name] = running
        self.report(StepStarted(step.name, planned.reason, estimate(planned), running.log))
        try:
            with self.store.writing():
                area = running.area = self.session.area()
        except StoreError as error:
            self._end(Outcome(step.name, error=error))
            return
        if step.shared and planned.key:
            self.planner.sharing.promise(planned.key)
        job = self.demand.job(running, area, again=step.name in self.planner.force)
        self.executor.start(job, step)

    # Results

    def _end(self, outcome: Outcome) -> None:
        running = self.running.pop(outcome.name)
        if running.area is not None:
            remove_tree(running.area)  # there still when its worker was killed
        running.lock.release()
        self.capacity.give_back(running.step)
        if outcome.fault:
            self.report(Warned(outcome.fault))
        if outcome.record is not None and running.step.shared and not outcome.origin:
            self.transfers.upload(outcome.name, outcome.record)
        result = StepResult(
            outcome.name,
            "failed" if outcome.error is not None else "built",
            running.planned.key,
            time.monotonic() - running.started,
            running.planned.reason,
            outcome.record,
            outcome.error,
            running.log,
            outcome.worker,
        )
        if outcome.origin:
            self._take_elsewhere(result, outcome)
        else:
            self._settle(result)

    def _take_elsewhere(self, result: StepResult, outcome: Outcome) -> None:
        """Settles a step whose files are in a remote, at once or when they have come, if they are wanted."""
        self.demand.remote[result.name] = Planned(
            result.name, "remote", result.key, result.reason, outcome.record, outcome.origin
        )
        if outcome.unsent:
            self.not_uploaded[result.name] = outcome.unsent
        elif outcome.record is not None:
            self.planner.sharing.kept(outcome.record.key)
        self.elsewhere[result.name] = result
        if result.name in self.outputs:
            self.demand.fetch_all(result.name)
        else:
            self._settle(result)

    def _settle(self, result: StepResult) -> None:
        """Notes a result and, from it, whatever becomes known of the steps behind it."""
        pending = [result]
        while pending:
            result = pending.pop()
            if result.name not in self.left:
                continue  # skipped already, through another input
            self.results[result.name] = result
            self.left.discard(result.name)
            self.report(StepFinished(result, tail(result.log) if result.status == "failed" else ""))
            if result.status == "failed" and not self.options.keep_going:
                self.stopping = f"not started: {result.name} failed"
            if result.record is not None:
                self.planner.results[result.name] = result.record
            for user in self.graph.users[result.name]:
                if user in self.left and user not in self.running and not self.interrupted:
                    pending += self._advance(user, result)

    def _advance(self, name: str, need: StepResult) -> list[StepResult]:
        waits = self.missing.get(name, set())
        if need.name not in waits:
            return []
        if need.record is None:
            reason = f"needs {need.name}, which failed" if need.status == "failed" else need.reason
            return [StepResult(name, "skipped", reason=reason)]
        waits.discard(need.name)
        if waits:
            return []
        planned, before = self.notes.consider(self.graph.step(name)), self.plans[name]
        if planned.state == "run" and planned.key == before.key:
            planned = before  # why it runs is that its files cannot be fetched
        self.plans[name] = planned
        if planned.state == "remote" and planned.record is not None:
            self.demand.remote[name] = planned
            self.planner.results[name] = planned.record
            if name in self.outputs:
                self.demand.fetch_all(name)
                return []
        if planned.state in ("hit", "remote"):
            return [_reused(planned)]
        self._enqueue(name)
        return []

    def _enqueue(self, name: str) -> None:
        heappush(self.ready, (-self.weights.get(name, inf), self.places[name], name))

    # Files of remotes

    def _fetched(self, done: Fetched) -> None:
        name, user = self.demand.fetched(done)
        made = self.elsewhere.get(name)
        if done.why and made is not None:
            why = f"{name} was built by {made.worker}, but its files cannot be fetched: {done.why}"
            self._settle(StepResult(user, "failed", self.plans[user].key, error=StoreError(why)))
        elif done.why:
            self._demote(name, done.why)
        elif user == name and (planned := self.demand.remote.get(name)) is not None:
            self._settle(made or _reused(planned))
        if user != name and user in self.left and not self.demand.waits(user) and not self.missing.get(user):
            self._enqueue(user)

    def _demote(self, name: str, why: str) -> None:
        """Has a step run after all, and those that wait for its files wait for it."""
        planned = self.demand.forget(name)
        if planned is None:
            return
        self.results.pop(name, None)
        self.left.add(name)
        self.plans[name] = replace(planned, state="run", reason=f"its files cannot be fetched: {why}")
        for user in self.graph.users[name]:
            if user in self.left and user not in self.running and user not in self.demand.remote:
                self.missing.setdefault(user, set()).add(name)
        self.missing[name] = self._unknown(name)
        if not self.missing[name]:
            self._enqueue(name)

    def _warn(self) -> None:
        for sentence in (*self.store.take_warnings(), *self.planner.sharing.take_warnings()):
            self.report(Warned(sentence))

    def result(self, seconds: float) -> RunResult:
        """Called once, at the end."""
        self.notes.write(self.results)
        for step in self.results.values():
            if step.record is not None:
                self.demand.keep(step.name)
        self._warn()
        steps = tuple(self.results[step.name] for step in self.planner.steps)
        return RunResult(steps, seconds, self.interrupted, self.stopped, self.not_uploaded)


def _reused(planned: Planned) -> StepResult:
    return StepResult(planned.name, "reused", planned.key, reason=planned.reason, record=planned.record)
