"""Executes a plan: the loop that starts steps and reacts to workers and downloads."""

from __future__ import annotations

import time
from contextlib import ExitStack

from mlcbuild.build.events import (
    INTERRUPTED_BY,
    Noted,
    Reporter,
    RunFinished,
    RunResult,
    RunStarted,
    StepFetched,
    StepFetching,
    StepPlaced,
    StepResult,
    StepStarted,
    StepWaiting,
    Uploading,
    Warned,
    silent,
)
from mlcbuild.build.graph import Graph
from mlcbuild.build.input_fetch import InputFetcher
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.resources import Capacity, Running, executor
from mlcbuild.build.schedule import LockWait, Options, estimate
from mlcbuild.build.tracking import StepState, TrackedStep, Tracker
from mlcbuild.build.transfer import Fetched, Transfers
from mlcbuild.build.usage import Notes
from mlcbuild.build.worker import Outcome
from mlcbuild.errors import SetupError, StoreError
from mlcbuild.remotes.sharing import RemoteRecord, Sharing
from mlcbuild.signals import Bell, Cancellation, Interruption, caught
from mlcbuild.store.locks import HeldLock
from mlcbuild.store.staging import StagingArea, remove_tree
from mlcbuild.store.store import Store

__all__ = ["Options", "execute"]

_TICK = 0.5
"""Maximum seconds that the main loop of a run waits for a message before it checks for dead workers."""


def execute(
    graph: Graph,
    store: Store,
    options: Options | None = None,
    report: Reporter = silent,
    sharing: Sharing | None = None,
    cancel: Cancellation | None = None,
) -> RunResult:
    """Builds the steps of a graph that have no result yet, and returns the outcome of every step.

    A failed step is part of the result, not an exception; so is an interruption by `cancel`, or by SIGINT and
    SIGTERM when the options enable signal handling. After an interruption, running steps end at once,
    published results are kept, and the next run continues from there. Steps whose results the remote caches
    of `sharing` have are not built, and new results are uploaded; a failing remote fails no step. An
    exception raised by `report` ends the run and propagates. Raises UsageError for an unknown step name,
    SourceError for an unreadable source, StoreError when the store cannot be used.
    """
    options = options or Options()
    started = time.monotonic()
    force, only = graph.match(options.force), graph.match(options.only)
    planner = Planner(graph, store, force=force, only=only, sharing=sharing, report=report)
    with Bell() as bell:
        end = Interruption(bell, planner.sharing.interrupt)
        with (cancel or Cancellation()).attached(end):
            run = _Run(planner, options, report, bell, end)
            run.carry_out()
    result = run.result(time.monotonic() - started)
    report(RunFinished(result))
    return result


class _Run:
    """One run of a graph: its plan, the state of its steps, and how it ended."""

    def __init__(
        self, planner: Planner, options: Options, report: Reporter, bell: Bell, end: Interruption
    ) -> None:
        self.planner = planner
        self.options = options
        self.report = report
        self.bell = bell
        self.end = end
        self.notes = Notes(planner)
        self.tracker = Tracker(planner, self.notes, options, report, end)
        self.stopped: tuple[str, ...] = ()
        """Names of the steps that were running when the run was interrupted."""
        self.not_uploaded: dict[str, tuple[str, ...]] = {}
        """Name of a built step -> remotes to which the upload of its result failed."""

    def carry_out(self) -> None:
        """Runs all steps of the plan that need to run. If no step needs to run, no worker process starts."""
        self.warn()
        steps = self.tracker.steps.values()
        hits = frozenset(item.name for item in steps if item.state is StepState.DONE)
        chains = {item.name: item.chain for item in self.tracker.left()}
        self.report(RunStarted(len(steps), len(hits), chains, hits))
        here = (item for item in steps if item.step.shared and item.planned.state == "hit")
        keys = (item.planned.key for item in here if item.planned.key is not None)
        if not self.tracker.is_complete or self.planner.sharing.unsent(keys):
            with ExitStack() as stack:
                _Loop(self, stack).run()

    def warn(self) -> None:
        """Reports damage in the store and problems of remote caches as warnings, those that are new since the
        last call.
        """
        for sentence in (*self.planner.store.take_warnings(), *self.planner.sharing.take_warnings()):
            self.report(Warned(sentence))

    def result(self, seconds: float) -> RunResult:
        """Writes the keys of a finished run's steps to the store, and returns the run's result. seconds:
        duration of the run.
        """
        results = self.tracker.results()
        self.notes.write(results)
        for item in self.tracker.steps.values():
            planned, is_used = item.remote, item.result is not None and item.result.record is not None
            if planned is not None and planned.record is not None and is_used:
                self.planner.sharing.keep(RemoteRecord(planned.record, planned.origin))
        self.warn()
        return RunResult(tuple(results.values()), seconds, self.end.reason, self.stopped, self.not_uploaded)


class _Loop:
    """The main loop of a run: starts steps, and handles messages of workers and transfers."""

    def __init__(self, run: _Run, stack: ExitStack) -> None:
        """Opens the executor and the background transfers of a run. stack: the exit stack that
        closes both.
        """
        self.owner = run
        self.tracker = run.tracker
        self.planner = run.planner
        self.store = run.planner.store
        self.report = run.report
        self.area: StagingArea = stack.enter_context(self.store.staging())
        if run.options.handle_signals:
            stack.enter_context(caught(run.end, run.options.executor == "inline"))
        self.executor = executor(run.options, self.planner.sharing, self.area, run.bell)
        self.capacity = Capacity(self.executor, run.options)
        self.transfers = Transfers(self.planner.sharing, run.bell.ring)
        self.inputs = InputFetcher(self.planner, self.tracker.steps, self.transfers, self.area)
        self.tracker.fetch_all = self._fetch_all
        stack.callback(self._close)

    def _close(self) -> None:
        self.executor.close()
        self.transfers.close()
        self.owner.not_uploaded |= self.transfers.not_uploaded
        for item in self.tracker.steps.values():
            if item.running is not None:
                item.running.lock.release()
        self.owner.notes.write(self.tracker.results())

    def run(self) -> None:
        """Starts steps and handles messages until every step has a result or the run is interrupted."""
        tracker, end = self.tracker, self.owner.end
        self._refuse()
        if count := self.transfers.resume(
            result for name, result in tracker.results().items() if tracker.steps[name].step.shared
        ):
            names = ", ".join(self.planner.sharing.writers)
            self.report(Noted(f"sending {count} earlier results that {names} may lack"))
        for item in tracker.in_state(StepState.ARRIVING):
            self._fetch_all(item.name)
        try:
            while not end.reason and (tracker.is_running or not (tracker.is_complete or tracker.stopping)):
                self._start_ready()
                self._listen()
                self.owner.notes.write_sometimes(tracker.results)
            if self.transfers.uploading:
                self.report(Uploading(self.transfers.uploading))
            while self.transfers.uploading and not end.reason:
                self._listen()
        except KeyboardInterrupt:
            if not end.reason:  # A KeyboardInterrupt that did not come from our signal handler
                raise
        self.owner.stopped = tuple(item.name for item in tracker.in_state(StepState.RUNNING))
        reason = f"{INTERRUPTED_BY}{end.reason}" if end.reason else tracker.stopping
        for item in tuple(tracker.left()):
            tracker.settle(StepResult(item.name, "skipped", item.planned.key, reason=reason))

    def _refuse(self) -> None:
        """Marks the steps that no worker can ever run as failed, before any step starts.

        Raises SetupError that lists them, unless the options say to continue after failures.
        """
        steps = (item.step for item in self.tracker.left() if item.planned.state != "remote")
        refused = self.executor.refusals(list(steps))
        if refused and not self.owner.options.keep_going:
            raise SetupError("\n".join(refused.values()))
        for name, why in refused.items():
            key = self.tracker.steps[name].planned.key
            self.tracker.settle(StepResult(name, "failed", key, error=SetupError(why)))

    def _listen(self) -> None:
        """Waits for messages of workers and transfers, and handles them."""
        locked = self.tracker.in_state(StepState.LOCKED)
        now = time.monotonic()
        waits = [max(0.0, item.lock_wait.again - now) for item in locked if item.lock_wait is not None]
        for message in self.executor.messages(min([_TICK, *waits]), self.owner.bell.fileno()):
            if isinstance(message, Outcome):
                self._end(message)
                continue
            running = self.tracker.steps[message.name].running if isinstance(message, StepPlaced) else None
            if running is not None:
                running.started = time.monotonic()
            self.report(message)
        self.owner.bell.heard()
        for event in self.transfers.messages():
            if isinstance(event, Fetched):
                self._fetched(event)
            else:
                self.report(event)
        self.owner.warn()

    # Starting steps

    def _start_ready(self) -> None:
        for item in self.tracker.in_state(StepState.LOCKED):
            if item.lock_wait is None or item.lock_wait.again <= time.monotonic():
                self.tracker.enqueue(item)
        self.tracker.start_ready(self._try_start, self._may_start)

    def _may_start(self) -> bool:
        return not (self.tracker.stopping or self.owner.end.reason) and self.capacity.open()

    def _try_start(self, item: TrackedStep) -> bool:
        """Starts a ready step, or moves it to the state of waiting for a lock or for downloads. Returns
        False if the free cores and memory do not suffice.
        """
        if not self.capacity.fits(item.step):
            return False
        planned = item.planned
        assert planned.key is not None  # A step without a key is pending, not ready.
        try:
            lock = self.store.try_lock(planned.key)
        except StoreError as error:
            self.tracker.settle(
                StepResult(item.name, "failed", planned.key, reason=planned.reason, error=error)
            )
            return True
        if lock is None:
            self._wait_for_lock(item, planned.key)
        elif not self._is_needless(item, planned.key, lock) and not self._waits_for_inputs(item, lock):
            self._start(item, lock)
        return True

    def _wait_for_lock(self, item: TrackedStep, key: str) -> None:
        self.tracker.move(item, StepState.LOCKED)
        item.lock_wait = item.lock_wait or LockWait()
        ours = any(other.planned.key == key for other in self.tracker.in_state(StepState.RUNNING))
        if item.lock_wait.postpone() and not ours:
            self.report(StepWaiting(item.name, self.store.holder(key)))

    def _is_needless(self, item: TrackedStep, key: str, lock: HeldLock) -> bool:
        """Returns True, and stores the result, if another process has built the step since the plan was made.
        key: the step's key; lock: the lock of this key, which the caller holds.
        """
        record = None if item.name in self.planner.force else self.owner.notes.find(key)
        if record is None:
            return False
        lock.release()
        self.tracker.settle(StepResult(item.name, "reused", key, reason="built meanwhile", record=record))
        return True

    def _waits_for_inputs(self, item: TrackedStep, lock: HeldLock) -> bool:
        """Starts to download the inputs of a step that only remotes have, and returns True; returns False if
        there are none.
        """
        missing = self.inputs.missing_inputs(item.step) if self.executor.here(item.step) else {}
        if not missing:
            return False
        lock.release()
        self.tracker.move(item, StepState.FETCHING)
        for name, files in missing.items():
            self._announce(self.inputs.fetch(name, files, item.name))
        return True

    def _start(self, item: TrackedStep, lock: HeldLock) -> None:
        step, planned = item.step, item.planned
        granted = self.capacity.take(step, self.tracker.queued)
        running = item.running = Running(step, planned, lock, granted, self.store.log(step.name))
        self.tracker.move(item, StepState.RUNNING)
        last = estimate(planned)
        display = step.display
        event = StepStarted(step.name, planned.reason, last, running.log, display.subject, display.typical)
        self.report(event)
        try:
            with self.store.writing():
                area = running.area = self.area.subdirectory()
        except StoreError as error:
            self._end(Outcome(step.name, error=error))
            return
        if step.shared and planned.key:
            self.planner.sharing.promise(planned.key)
        job = self.inputs.job(running, area, again=step.name in self.planner.force)
        self.executor.start(job, step)

    # Results

    def _end(self, outcome: Outcome) -> None:
        item = self.tracker.steps[outcome.name]
        running, item.running = item.running, None
        assert running is not None
        if running.area is not None:
            remove_tree(running.area)  # The directory still exists if the worker was killed.
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
            self._end_elsewhere(item, result, outcome)
        else:
            self.tracker.settle(result)

    def _end_elsewhere(self, item: TrackedStep, result: StepResult, outcome: Outcome) -> None:
        """Stores the result of a step that another machine built and whose files are on a remote cache. If
        this machine needs the files, downloads them first.
        """
        item.remote = Planned(item.name, "remote", result.key, result.reason, outcome.record, outcome.origin)
        if outcome.unsent:
            self.owner.not_uploaded[item.name] = outcome.unsent
        elif outcome.record is not None:
            self.planner.sharing.kept(outcome.record.key)
        item.built_elsewhere = result
        if item.name in self.tracker.outputs:
            self.tracker.move(item, StepState.ARRIVING)
            self._fetch_all(item.name)
        else:
            self.tracker.settle(result)

    # Files of remotes

    def _fetch_all(self, name: str) -> None:
        self._announce(self.inputs.fetch_all(name))

    def _announce(self, download: StepFetching) -> None:
        """Reports the start of a download, unless the run reads no remote cache: the download then fails at
        once, and the step runs.
        """
        if self.planner.sharing.reads:
            self.report(download)

    def _fetched(self, fetched: Fetched) -> None:
        source, user = self.inputs.end(fetched)
        self.report(StepFetched(source.name))
        result = source.built_elsewhere
        if fetched.why and result is not None:
            why = (
                f"{source.name} was built by {result.worker}, but its files cannot be fetched: {fetched.why}"
            )
            self.tracker.settle(StepResult(user.name, "failed", user.planned.key, error=StoreError(why)))
        elif fetched.why:
            self.tracker.demote(source, fetched.why)
        elif user is source:
            self.tracker.arrived(source)
        if user.state is StepState.FETCHING and not user.requests:
            self.tracker.enqueue(user)
