"""Downloads inputs of steps that only a remote cache has, and tracks which steps wait for which download."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlcbuild.build.events import StepFetching
from mlcbuild.build.graph import Source, Step
from mlcbuild.build.plan import Planner
from mlcbuild.build.resources import Running
from mlcbuild.build.tracking import TrackedStep
from mlcbuild.build.transfer import Fetched, Transfers
from mlcbuild.build.worker import Job, JobInput
from mlcbuild.canon import Entry
from mlcbuild.errors import StoreError
from mlcbuild.store.staging import StagingArea


class InputFetcher:
    """Downloads files of results on a remote cache when a step on this machine reads them, or when the user
    needs them.
    """

    def __init__(
        self, planner: Planner, steps: Mapping[str, TrackedStep], transfers: Transfers, staging: StagingArea
    ) -> None:
        self._planner = planner
        self._steps = steps
        self._transfers = transfers
        self._staging = staging
        self._requests: dict[int, tuple[str, str]] = {}
        """Identifier of a running download -> (step whose files are downloaded, step that waits for them)."""

    def job(self, running: Running, area: Path, *, again: bool) -> Job:
        """Returns the job that a worker needs to run a step in the directory `area`. again: True if the
        step runs even if its result is in the store.
        """
        step = running.step
        preimage = self._planner.preimage(step)
        return Job(
            name=step.name,
            key=running.planned.key or preimage.key(),
            preimage=preimage,
            inputs=tuple(self._input(argument, step) for argument in step.inputs),
            cores=running.cores,
            store=self._planner.store.root,
            area=area,
            log=running.log,
            shared=step.shared,
            again=again,
        )

    def missing_inputs(self, step: Step) -> dict[str, tuple[Entry, ...]]:
        """Returns name of a step -> files of its result that `step` reads, that a remote cache has, and that
        this store lacks.
        """
        store = self._planner.store
        missing: dict[str, tuple[Entry, ...]] = {}
        for item in step.inputs.values():
            name = self._planner.graph.resolve(item.node)
            if name in self._steps and self._steps[name].remote is not None:
                files = self._planner.tree(item).files
                absent = tuple(entry for entry in files if not store.hold(entry.digest, entry.size))
                if absent:
                    missing[name] = (*missing.get(name, ()), *absent)
        return missing

    def fetch(self, name: str, files: tuple[Entry, ...], user: str) -> StepFetching:
        """Starts the download of `files`, results of the step `name`, from the remote cache that has them,
        and returns the event that announces it. user: name of the step that waits for the files.
        """
        remote = self._steps[name].remote
        assert remote is not None
        number = self._transfers.fetch(name, files)
        self._requests[number] = name, user
        self._steps[user].requests |= {number}
        return StepFetching(name, remote.origin, sum(entry.size for entry in files))

    def fetch_all(self, name: str) -> StepFetching:
        """Starts the download of all files of a build step's result from the remote cache that has them, and
        returns the StepFetching event (step name, cache, bytes) that reports the start to the user. A failure
        is reported later, when the download ends. name: name of the step, whose record a remote cache must
        hold.
        """
        remote = self._steps[name].remote
        assert remote is not None and remote.record is not None
        return self.fetch(name, remote.record.files, name)

    def end(self, done: Fetched) -> tuple[TrackedStep, TrackedStep]:
        """Records that a download has ended, successfully or not.

        Returns (step whose files were downloaded, step that waited for them).
        """
        name, waiting = self._requests.pop(done.request)
        source, user = self._steps[name], self._steps[waiting]
        user.requests -= {done.request}
        store, record = self._planner.store, source.remote.record if source.remote is not None else None
        if record is not None and not store.lost(record):
            with suppress(StoreError), store.writing():  # Otherwise the next run downloads the record again.
                store.put_record(record, self._staging.subdirectory() / "record")
        return source, user

    def _input(self, argument: str, step: Step) -> JobInput:
        item = step.inputs[argument]
        node = self._planner.graph[item.node]
        files = self._planner.tree(item).files
        if isinstance(node, Source):
            return JobInput(argument, files, node.root.absolute(), self._planner.stats[node.name])
        return JobInput(argument, files)
