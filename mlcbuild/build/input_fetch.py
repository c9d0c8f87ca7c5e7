"""Where the files of a step's inputs come from, and which steps wait for files that only a remote has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mlcbuild.build.events import Reporter, StepFetched, StepFetching
from mlcbuild.build.graph import Source, Step
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.resources import Running
from mlcbuild.build.transfer import Fetched, Transfers
from mlcbuild.build.worker import Given, Job
from mlcbuild.canon import Entry
from mlcbuild.errors import StoreError
from mlcbuild.remotes.sharing import Found
from mlcbuild.store.staging import Session


class Demand:
    """Files of remotes come only when something here reads them: a step that runs, or the user."""

    def __init__(self, planner: Planner, report: Reporter) -> None:
        self.remote: dict[str, Planned] = {}
        """Steps that need not run because a remote has their records."""
        self._planner = planner
        self._report = report
        self._requests: dict[int, tuple[str, str]] = {}
        """Request -> the step whose files it is for, and the step that waits for them."""
        self._awaited: dict[str, set[int]] = {}

    def open(self, transfers: Transfers, session: Session) -> None:
        self._transfers = transfers
        self._session = session

    def waits(self, name: str) -> bool:
        """Whether a step waits for files."""
        return bool(self._awaited.get(name))

    def job(self, running: Running, area: Path, *, again: bool) -> Job:
        """What a worker must know to run a step in the directory `area`."""
        step = running.step
        preimage = self._planner.preimage(step)
        return Job(
            name=step.name,
            key=running.planned.key or preimage.key(),
            preimage=preimage,
            inputs=tuple(self._given(argument, step) for argument in step.inputs),
            cores=running.cores,
            store=self._planner.store.root,
            area=area,
            log=running.log,
            shared=step.shared,
            again=again,
        )

    def fetch_inputs(self, step: Step) -> bool:
        """Whether a step must wait for files of its inputs; they are on their way then."""
        store = self._planner.store
        for item in step.inputs.values():
            name = self._planner.graph.resolve(item.node)
            if name in self.remote:
                files = self._planner.tree(item).files
                absent = [entry for entry in files if not store.hold(entry.digest, entry.size)]
                if absent:
                    self._fetch(name, tuple(absent), step.name)
        return self.waits(step.name)

    def fetch_all(self, name: str) -> None:
        """Brings the whole artifact of a step that a remote has; it waits for itself."""
        record = self.remote[name].record
        assert record is not None  # the remote has it
        self._fetch(name, record.files, name)

    def fetched(self, done: Fetched) -> tuple[str, str]:
        """Takes note of the end of a request: the step whose files it was for, and the step that waited."""
        name, user = self._requests.pop(done.request)
        self._awaited[user].discard(done.request)
        self._report(StepFetched(name))
        store, planned = self._planner.store, self.remote.get(name)
        if planned is not None and planned.record is not None and not store.lost(planned.record):
            with suppress(StoreError):  # without it, the next run finds the record as it was found now
                store.put_record(planned.record, self._session.area() / "record")
        return name, user

    def forget(self, name: str) -> Planned | None:
        """The step must run after all; what was planned for it, or None when that was said before."""
        planned = self.remote.pop(name, None)
        if planned is not None and planned.key is not None:
            self._planner.sharing.forget(planned.key)
        return planned

    def keep(self, name: str) -> None:
        """The record of a step was used, whether or not its files are here."""
        planned = self.remote.get(name)
        if planned is not None and planned.record is not None:
            self._planner.sharing.keep(Found(planned.record, planned.origin))

    def _fetch(self, name: str, files: tuple[Entry, ...], user: str) -> None:
        self._report(StepFetching(name, self.remote[name].origin, sum(entry.size for entry in files)))
        number = self._transfers.fetch(name, files)
        self._requests[number] = name, user
        self._awaited.setdefault(user, set()).add(number)

    def _given(self, argument: str, step: Step) -> Given:
        item = step.inputs[argument]
        node = self._planner.graph[item.node]
        files = self._planner.tree(item).files
        if isinstance(node, Source):
            return Given(argument, files, node.root.absolute(), self._planner.stats[node.name])
        return Given(argument, files)
