"""A cluster worker: one process that runs the jobs of a dask scheduler, with a separate or a shared store.

Each job runs in a child process (see `executors.Pool`), so that it can be killed when its run is cancelled,
or when this worker stops or dies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcbuild.build.cluster.wire import TOPIC, Answer, Order, OrderInput
from mlcbuild.build.events import StepProgress
from mlcbuild.build.executors import Pool
from mlcbuild.build.worker import Job, JobInput, Outcome
from mlcbuild.canon import Entry, module_path, source_digest
from mlcbuild.errors import MlcbuildError, RemoteError, StepError
from mlcbuild.keyfile import Signer
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.signals import Bell
from mlcbuild.store.staging import StagingArea, remove_tree
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from distributed import Worker

_POLL = 0.1
"""Seconds between two checks whether a running job was cancelled, and whether its log has new text."""
_PROGRESS_INTERVAL = 0.5
"""Minimum seconds between two progress events of a job."""
_PIECE = 8192
"""Maximum bytes of a step's log file in one event, which is sent to the run; a scheduler keeps the last
thousand events.
"""
_MOST_LOG = 1 << 20
"""Maximum bytes of a step's log file that are sent to the run while the step runs; the end of the file is
always sent.
"""
LEAVE = 5.0
"""Maximum seconds to wait until a stopping cluster worker has left the cluster."""


@dataclass
class Site:
    """The state that all jobs of one cluster worker process share: the worker's name, its store, its staging
    directory, and its idle child processes. The methods are thread-safe.
    """

    name: str
    store: Store
    staging: StagingArea
    signer: Signer | None = None
    """The key that signs the records which this cluster worker uploads, if it has one."""
    stopping: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Event that is set once the scheduler has been informed that this worker leaves the cluster."""
    active: int = 0
    """Number of build steps that this cluster worker is running now."""
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _idle: list[Pool] = field(default_factory=list)

    def count(self, change: int) -> None:
        with self._guard:
            self.active += change

    def area(self) -> Path:
        with self._guard:
            return self.staging.subdirectory()

    def take(self) -> Pool:
        """Returns a pool of child processes that runs one job of a cluster worker, preferably an idle one
        that is already running.
        """
        with self._guard:
            return self._idle.pop() if self._idle else Pool(1)

    def give(self, pool: Pool) -> None:
        with self._guard:
            self._idle.append(pool)

    def digest(self, path: Path) -> str:
        with self._guard:  # The digest cache is not thread-safe.
            return self.store.cache.digest(path)[0]

    def close(self) -> None:
        self.stopping.set()
        with self._guard:
            while self._idle:
                self._idle.pop().close()
            self.store.cache.save()
            self.staging.close()


sites: list[Site] = []
"""A list with one Site in a cluster worker process: its name, store, staging directory and idle child
processes, which all jobs share. Empty in other processes. Global, because dask calls `work` with the encoded
job as the only argument.
"""


def work(text: str) -> str:
    """Runs one job, encoded as text, on this cluster worker and returns the encoded Answer. dask calls it in
    a thread.

    Raises Reschedule, with which dask gives the job to another worker, if this one stops meanwhile, and
    RuntimeError in a process that `mlcbuild worker` has not started.
    """
    from distributed import Reschedule, get_worker

    worker = get_worker()
    if not sites:
        raise RuntimeError("this worker was not started with `mlcbuild worker`")
    site, order, task = sites[0], Order.decode(text), worker.get_current_task()
    attempt = _Attempt(site, order, partial(_is_wanted, worker, task), partial(worker.log_event, TOPIC))
    answer = attempt.run()
    if answer.stopped and site.stopping.is_set():
        site.left.wait(LEAVE)  # Otherwise dask could send the job to this worker again.
        raise Reschedule
    return answer.encode()


def _is_wanted(worker: Worker, task: Any) -> bool:
    """Returns True while a run still waits for the result of a dask task; False once the task was cancelled
    or its run has died.
    """
    state = worker.state.tasks.get(task)
    return state is not None and state.state not in ("cancelled", "resumed", "released", "forgotten")


class _Attempt:
    """One attempt of a cluster worker to run a build step that it received from a run."""

    def __init__(
        self,
        site: Site,
        order: Order,
        is_wanted: Callable[[], bool],
        send_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._site = site
        self._order = order
        self._is_wanted = is_wanted
        self._send_event = send_event
        self._id = os.urandom(8).hex()
        self._stop = threading.Event()
        """Event that is set when the run cancels this step; downloads and uploads for the step then stop,
        too."""
        self._ended = threading.Event()
        links = [Link(remote, site.signer) for remote in order.remotes]
        self._sharing = Sharing(site.store, links)
        self._last_progress = time.monotonic()
        self._sent = 0

    def run(self) -> Answer:
        site, order = self._site, self._order
        site.count(1)
        self._emit("start", site=site.name)
        threading.Thread(target=self._watch, daemon=True).start()
        self._same = (site.store.root / "tmp" / order.run).is_dir()
        answer = Answer(site.name, key=order.key, same_store=self._same)
        try:
            self._check()
            record = None if order.again or self._same else site.store.find(order.key)
            if record is not None:
                return self._share(Outcome(order.info.step, record), answer)
            inputs = self._gather()
            if isinstance(inputs, list):
                return replace(answer, lacking=tuple(inputs))
            return self._share(self._perform(inputs), answer)
        except CancelledError:
            self._emit("stopped")
            return replace(answer, stopped=True)
        except MlcbuildError as error:
            return replace(answer, error=error, warnings=tuple(self._sharing.take_warnings()))
        finally:
            self._ended.set()
            self._sharing.close()
            site.count(-1)

    def _watch(self) -> None:
        while not self._ended.wait(_POLL):
            if not self._is_wanted() or self._site.stopping.is_set():
                self._stop.set()
                return

    def _emit(self, kind: str, **more: Any) -> None:
        self._send_event(
            {"run": self._order.run, "step": self._order.info.step, "attempt": self._id, "kind": kind, **more}
        )

    def _check(self) -> None:
        """Checks that this cluster worker has the same source files as the run that sent the job, and that it
        can return the result to the run, through a common store or a remote cache.

        Raises StepError for differing source files, and RemoteError without a common store or remote cache.
        """
        links = self._sharing.links
        if not self._same and not any(link.remote.writes() and link.remote.reads for link in links):
            raise RemoteError(
                f"step {self._order.info.step}: the store of the worker {self._site.name} is not the run's, "
                "and there is no remote that both read and write: name one under cache: remotes:, or start "
                "the worker with the run's store"
            )
        image = self._order.info.preimage
        module = image.action.partition(":")[0]
        step, name = self._order.info.step, self._site.name
        if module_path(module) is None:
            raise StepError(
                f"step {step}: the worker {name} has no module '{module}': install the same mlcbuild there"
            )
        # Equal files have equal imports: if all listed files are equal, none is missing from the list.
        other = sorted(path for path, digest in image.code.items() if source_digest(path) != digest)
        if other:
            raise StepError(
                f"step {step}: the worker {name} has another mlcbuild ({', '.join(other[:3])} "
                f"{'differ' if len(other) > 1 else 'differs'}): install the same mlcbuild there"
            )

    def _gather(self) -> dict[str, JobInput] | list[str]:
        """Makes the input files of a build step available on this cluster worker. Returns name of an argument
        of the step's action -> its files (JobInput), or a list of the digests of files that the worker cannot
        obtain.
        """
        lacking: list[str] = []
        inputs = {}
        for argument, argument_files in self._order.inputs.items():
            inputs[argument] = self._in_place(argument, argument_files) or JobInput(
                argument, argument_files.files
            )
            if inputs[argument].root is None:
                lacking += [entry.digest for entry in argument_files.files if not self._fetch(entry)]
        return lacking or inputs

    def _in_place(self, argument: str, source: OrderInput) -> JobInput | None:
        """Returns an input of a step if its files are already on this machine, at the path that the run names
        and with the same bytes; None otherwise. argument: name of the input.
        """
        if source.root is None:
            return None
        root, stats = Path(source.root), {}
        try:
            for entry in source.files:
                path = root / entry.path
                before = path.stat()
                if before.st_size != entry.size or self._site.digest(path) != entry.digest:
                    return None
                stats[entry.path] = (before.st_size, before.st_mtime_ns)
        except (OSError, MlcbuildError):
            return None
        return JobInput(argument, source.files, root, stats)

    def _fetch(self, entry: Entry) -> bool:
        if self._site.store.hold(entry.digest, entry.size):
            return True
        return not self._sharing.fetch(entry, self._stop, lambda _: None)

    def _perform(self, inputs: Mapping[str, JobInput]) -> Outcome:
        """Runs a step's action in a child process and returns its outcome: the step record or an error.
        inputs: name of an argument of the action -> its files on this machine. Raises CancelledError if the
        run has cancelled the job.
        """
        site, order = self._site, self._order
        area = site.area()
        log = site.staging.directory / f"{area.name}.log"
        job = Job(
            name=order.info.step,
            key=order.key,
            preimage=order.info.preimage,
            inputs=tuple(inputs.values()),
            cores=order.cores,
            store=site.store.root,
            area=area,
            log=log,
            shared=order.info.shared,
        )
        pool, bell = site.take(), Bell()
        outcome = None
        try:
            pool.start(job)
            while outcome is None:
                if self._stop.is_set():
                    raise CancelledError
                for message in pool.messages(_POLL, bell.fileno()):
                    if isinstance(message, Outcome):
                        outcome = message
                    elif isinstance(message, StepProgress):
                        self._send_progress(message)
                self._send_log(log)
            self._send_log(log, end=True)
        finally:
            bell.close()
            if outcome is None:
                pool.close()
                remove_tree(area)
            else:
                site.give(pool)
            log.unlink(missing_ok=True)
        return outcome

    def _send_progress(self, message: StepProgress) -> None:
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_INTERVAL or message.done >= message.total:
            self._last_progress = now
            self._emit("progress", done=message.done, total=message.total, unit=message.unit)

    def _send_log(self, log: Path, *, end: bool = False) -> None:
        """Sends the next bytes of a step's log file, at most 8192, through the dask scheduler to the run, as
        an event with their offset. Nothing more is sent after 1 MiB, except by the last call (end: True),
        which sends the end of the file.
        """
        try:
            size = log.stat().st_size
        except OSError:
            return
        if end:
            self._sent = max(self._sent, size - _PIECE)
        elif self._sent >= _MOST_LOG:
            return
        with log.open("rb") as file:
            file.seek(self._sent)
            data = file.read(_PIECE)
        if data:
            self._emit("log", at=self._sent, text=data.decode(errors="replace"))
            self._sent += len(data)

    def _share(self, outcome: Outcome, answer: Answer) -> Answer:
        """Uploads a step's result to all writable remote caches, unless worker and run use the same store.
        Returns a copy of `answer`, the worker's reply to the run, with the step record or the error, the URL
        of a remote that has the files, and the URLs of the remotes to which the upload failed.

        Raises RemoteError when no remote cache from which the run reads has the files.
        """
        result = replace(answer, record=outcome.record, fault=outcome.fault, error=outcome.error)
        if outcome.record is None or self._same:
            return result
        links = self._sharing.links
        store = self._site.store
        receivers = [
            link for link in links if link.remote.writes() and link.send(outcome.record, store, self._stop)
        ]
        readable = [link.name for link in receivers if link.remote.reads]
        warnings = tuple(self._sharing.take_warnings())
        if not readable:
            raise RemoteError(
                f"step {outcome.name} was built by the worker {self._site.name}, but its files could not be "
                "sent to a remote: " + "; ".join(warnings)
            )
        unsent = tuple(link.name for link in links if link.remote.writes() and link not in receivers)
        return replace(result, origin=readable[0], unsent=unsent, warnings=warnings)
