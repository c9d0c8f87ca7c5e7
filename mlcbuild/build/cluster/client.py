"""An executor that runs steps on the workers of a dask.distributed cluster.

dask matches jobs with workers, notices dead workers and reschedules their jobs. This module adds the rest:
jobs are plain text (see `wire`), a step that no worker can run is refused before it is submitted, inputs that
a worker cannot reach are sent to it through a remote cache, and every wait is limited."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

from mlcbuild.build.cluster import Address, able, refusal, resources, security
from mlcbuild.build.cluster.wire import TOPIC, Answer, order
from mlcbuild.build.events import StepPlaced, StepProgress, Warned
from mlcbuild.build.executors import Message, Pool
from mlcbuild.build.graph import Step
from mlcbuild.build.worker import Job, Outcome
from mlcbuild.errors import MlcbuildError, SetupError, StepError
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.store.links import copy
from mlcbuild.store.staging import StagingArea

if TYPE_CHECKING:
    from distributed import Client, Future

_CONNECT = 20.0
"""Maximum seconds to wait for an answer of the cluster's scheduler."""
_WORKERS = 20.0
"""Maximum seconds to wait until the first cluster worker is present."""
_GATHER = 30.0
"""Maximum seconds to wait for the result of a job after dask reports that this result is ready."""
_CENSUS = 2.0
"""Minimum seconds between two updates of the list of cluster workers."""
_ABSENT = 60.0
"""Seconds without a suitable cluster worker after which a job fails."""
MAX_STARTS = 3
"""Maximum number of starts of a job, so that a job that kills its worker does not kill all workers."""
_MAX_SUPPLIES = 3
"""Maximum number of times that the missing inputs of a job are sent before the job fails."""


@dataclass
class _Submitted:
    step: Step
    job: Job
    future: Future[str]
    starts: list[str] = field(default_factory=list)
    """Names of the cluster workers that started the job, except those that returned it unfinished."""
    attempt: str = ""
    supplies: int = 0
    """Number of times that missing inputs were sent to the job's worker."""
    absent: float | None = None
    """Monotonic time since which no worker could run the job; None while one can."""


class Cluster:
    """Runs steps on a dask cluster. Steps that must stay on this machine run in a local process.

    Raises SetupError when dask is missing, or when no scheduler or no worker can be reached."""

    def __init__(
        self, address: Address, sharing: Sharing, staging: StagingArea, ring: Callable[[], None]
    ) -> None:
        self._address = address
        self._sharing = sharing
        self._staging = staging
        self._ring = ring
        self._client = _connect(address)
        self._heard: SimpleQueue[tuple[str, str, Any]] = SimpleQueue()
        self._jobs: dict[str, _Submitted] = {}
        self._local = Pool(1)
        self._supplier = ThreadPoolExecutor(2)
        self._stop = Event()
        self._client.subscribe_topic(TOPIC, self._event)
        self._workers: dict[str, dict[str, float]] = {}
        self._counted = 0.0
        self._wait_for_workers()

    # Workers

    @property
    def cores(self) -> int:
        return max(1, int(sum(worker["cores"] for worker in self._workers.values())))

    @property
    def memory(self) -> int:
        return int(sum(worker["memory"] for worker in self._workers.values()))

    @property
    def capacity(self) -> int:
        return self.cores

    def here(self, step: Step) -> bool:
        return not step.shared

    def grant(self, step: Step, requested: int) -> int:
        """Returns the number of cores that a step gets on the cluster: the requested number, but at most as
        many as the largest suitable worker has."""
        needs = resources(step, 1)
        return min(
            requested, max((int(w["cores"]) for w in self._workers.values() if able(needs, w)), default=1)
        )

    def refusals(self, steps: Iterable[Step]) -> dict[str, str]:
        """Returns step name -> error message for each step that no worker can run."""
        self._census()
        reasons = {step.name: refusal(step, self._workers) for step in steps if step.shared}
        return {name: f"step {name}: {why}" for name, why in reasons.items() if why}

    def _wait_for_workers(self) -> None:
        end = time.monotonic() + _WORKERS
        while not self._census():
            if time.monotonic() > end:
                self.close()
                raise SetupError(
                    f"{self._address} has no worker: start one with `mlcbuild worker {self._address}`"
                )
            time.sleep(0.2)

    def _census(self) -> Mapping[str, Mapping[str, float]]:
        """Updates the list of cluster workers if it is old, and returns worker name -> resources (name ->
        amount). Ignores plain dask workers, which declare no cores."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        self._workers = {
            str(worker["name"]): dict(worker["resources"])
            for worker in workers
            if "cores" in worker["resources"]
        }
        self._counted = time.monotonic()
        return self._workers

    # Jobs

    def start(self, job: Job, step: Step) -> None:
        if self.here(step):
            self._local.start(job, step)
            return
        self._submit(step, job)

    def _submit(self, step: Step, job: Job) -> None:
        from mlcbuild.build.cluster.site import work

        remotes = tuple(link.remote for link in self._sharing.links)
        text = order(job, self._staging.directory.name, remotes, again=job.again).encode()
        future = self._client.submit(
            work,
            text,
            key=f"{job.name}-{os.urandom(8).hex()}",
            resources=resources(step, job.cores),
            pure=False,
        )
        before = self._jobs.get(job.name)
        self._jobs[job.name] = submitted = _Submitted(step, job, future)
        if before is not None:
            submitted.starts, submitted.supplies = before.starts, before.supplies
        future.add_done_callback(partial(self._done, job.name))

    def _done(self, name: str, future: Future[str]) -> None:
        self._heard.put(("done", name, future))
        self._ring()

    def _event(self, event: tuple[float, Any]) -> None:
        """Passes an event (time, details) about a job on to the main loop. A thread of dask calls it."""
        details = event[1]
        if isinstance(details, dict) and details.get("run") == self._staging.directory.name:
            self._heard.put((str(details["kind"]), str(details["step"]), details))
            self._ring()

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        messages: list[Message] = [*self._local.messages(0.0 if not self._heard.empty() else timeout, wake)]
        ended: dict[str, Future[str]] = {}
        while True:
            try:
                kind, name, details = self._heard.get_nowait()
            except Empty:
                break
            submitted = self._jobs.get(name)
            if submitted is None:
                continue
            if kind == "done":
                if details is submitted.future:
                    ended[name] = details
            elif kind == "supplied":
                messages += self._supplied(submitted, details)
            else:
                messages += self._hear(submitted, kind, details)
        messages += self._answers(ended)
        if time.monotonic() - self._counted > _CENSUS and self._jobs:
            messages += self._look_after()
        return messages

    def _hear(self, submitted: _Submitted, kind: str, details: dict[str, Any]) -> list[Message]:
        name, log = submitted.job.name, submitted.job.log
        if kind == "start":
            return self._started(submitted, details)
        if details["attempt"] != submitted.attempt:
            return []  # The worker was declared dead before.
        if kind == "progress":
            return [StepProgress(name, int(details["done"]), int(details["total"]), str(details["unit"]))]
        if kind == "log":
            with suppress(OSError), log.open("r+b") as file:
                file.seek(int(details["at"]))
                file.write(str(details["text"]).encode())
        if kind == "stopped" and submitted.starts:
            submitted.starts.pop()
        return []

    def _started(self, submitted: _Submitted, details: dict[str, Any]) -> list[Message]:
        name, worker = submitted.job.name, str(details["site"])
        submitted.attempt = details["attempt"]
        with suppress(OSError):
            submitted.job.log.parent.mkdir(parents=True, exist_ok=True)
            submitted.job.log.write_bytes(b"")
        messages: list[Message] = [StepPlaced(name, worker)]
        if submitted.starts:
            messages.append(Warned(f"step {name} is run again on {worker}: {submitted.starts[-1]} was lost"))
        submitted.starts.append(worker)
        if len(submitted.starts) > MAX_STARTS:
            lost = ", ".join(submitted.starts[:-1])
            messages.append(
                self._fail(submitted, f"the workers that ran it were lost, one after the other: {lost}")
            )
        return messages

    def _answers(self, ended: Mapping[str, Future[str]]) -> list[Message]:
        """Returns the outcomes of ended cluster jobs, as messages for the main loop. ended: the jobs ->
        dask's futures of their answers."""
        if not ended:
            return []
        messages: list[Message] = []
        finished = {name: future for name, future in ended.items() if future.status == "finished"}
        texts: dict[str, str] = {}
        with suppress(Exception):  # on failure, the results are requested one by one below
            texts = dict(self._client.gather(finished)) if len(finished) > 1 else {}
        for name, future in ended.items():
            submitted = self._jobs[name]
            try:
                answer = Answer.decode(texts.get(name) or future.result(timeout=_GATHER))
            except Exception as error:  # dask, or another version of mlcbuild, may raise anything
                messages.append(self._fail(submitted, self._explain(future, error)))
                continue
            messages += self._take(submitted, answer)
        return messages

    def _explain(self, future: Future[str], error: Exception) -> str:
        kind = type(error).__name__
        if kind == "KilledWorker":
            return (
                f"every worker that ran it was lost, the last one was {getattr(error, 'last_worker', '')}: "
                "it may need more memory than it declares"
            )
        if future.status in ("cancelled", "lost") or kind in ("CancelledError", "FutureCancelledError"):
            return f"the scheduler {self._address} was lost; built steps are kept, run again"
        return f"{kind} in the cluster: {' '.join(str(error).split())[:300]}"

    def _take(self, submitted: _Submitted, answer: Answer) -> list[Message]:
        name = submitted.job.name
        warnings: list[Message] = [Warned(f"worker {answer.worker}: {words}") for words in answer.warnings]
        if answer.lacking:
            submitted.supplies += 1
            if submitted.supplies > _MAX_SUPPLIES:
                why = f"the worker {answer.worker} cannot get its inputs from any remote"
                return [*warnings, self._fail(submitted, why)]
            self._supplier.submit(self._supply, submitted, answer)
            return warnings
        if answer.stopped:
            return [*warnings, self._fail(submitted, f"the worker {answer.worker} was stopped: run again")]
        self._forget(submitted)
        outcome = Outcome(
            name,
            answer.record,
            answer.fault,
            answer.error,
            origin=answer.origin,
            worker=answer.worker,
            unsent=answer.unsent,
        )
        return [*warnings, outcome]

    def _fail(self, submitted: _Submitted, why: str) -> Outcome:
        self._forget(submitted)
        return Outcome(submitted.job.name, error=StepError(f"step {submitted.job.name}: {why}"))

    def _forget(self, submitted: _Submitted) -> None:
        self._jobs.pop(submitted.job.name, None)
        with suppress(Exception):  # the connection may be closed already
            (submitted.future.release if submitted.future.done() else submitted.future.cancel)()

    def _look_after(self) -> list[Message]:
        """Fails the cluster jobs for which no suitable worker was present for a minute, and returns their
        outcomes.
        """
        messages: list[Message] = []
        try:
            self._census()
        except Exception:  # the scheduler is gone; dask tries to reconnect
            self._counted = time.monotonic()
            self._workers = {}
        now = time.monotonic()
        for submitted in list(self._jobs.values()):
            needs = resources(submitted.step, submitted.job.cores)
            if any(able(needs, worker) for worker in self._workers.values()):
                submitted.absent = None
                continue
            submitted.absent = submitted.absent or now
            if now - submitted.absent > _ABSENT:
                why = (
                    refusal(submitted.step, self._workers)
                    or "no worker has as many cores as the step was granted"
                )
                messages.append(self._fail(submitted, f"{why}; waited for one for {_ABSENT:.0f} seconds"))
        return messages

    # Inputs

    def _supply(self, submitted: _Submitted, answer: Answer) -> None:
        """Sends a worker the input files that the worker's answer lists as missing, then submits the job
        again. Runs in a thread."""
        try:
            why = self._give(submitted.job, set(answer.lacking), answer.same_store)
        except MlcbuildError as error:
            why = str(error)
        except CancelledError:
            return
        except Exception as error:  # a defect must not leave the loop waiting
            why = f"{type(error).__name__}: {error}"
        self._heard.put(("supplied", submitted.job.name, why))
        self._ring()

    def _give(self, job: Job, lacking: set[str], same_store: bool) -> str:
        """Uploads input files that the worker of a job lacks. Returns the reason why one cannot be sent, or
        "" if all were sent. lacking: digests of the files. Raises MlcbuildError, CancelledError or OSError.
        """
        store = self._sharing.store
        for job_input in job.inputs:
            for entry in job_input.files:
                if entry.digest not in lacking:
                    continue
                lacking.discard(entry.digest)
                place = Path(job_input.root, entry.path) if job_input.root else store.blob(entry.digest)
                is_available = job_input.root is not None or store.holds(entry.digest, entry.size)
                why = "" if is_available else self._sharing.fetch(entry, self._stop, lambda _: None)
                if why:
                    return f"{job_input.argument}/{entry.path} is not available: {why}"
                if same_store:
                    # Two threads may give one file, and `put_blob` leaves a file that the store has.
                    part = self._staging.directory / f"give-{os.urandom(8).hex()}"
                    copy(place, part)
                    store.put_blob(entry.digest, part)
                    part.unlink(missing_ok=True)
                elif not self._sharing.offer(entry, place, self._stop):
                    return f"{job_input.argument}/{entry.path} cannot be sent to a remote that workers read"
        return ""

    def _supplied(self, submitted: _Submitted, why: str) -> list[Message]:
        if why:
            return [self._fail(submitted, why)]
        if submitted.starts:
            submitted.starts.pop()  # the job did not run on this worker
        self._submit(submitted.step, submitted.job)
        return []

    def close(self) -> None:
        """Stops all running jobs. Remote workers notice that their jobs were cancelled."""
        self._stop.set()
        self._local.close()
        self._supplier.shutdown(wait=False, cancel_futures=True)
        futures = [submitted.future for submitted in self._jobs.values()]
        self._jobs = {}
        with suppress(Exception):  # the scheduler may be gone
            if futures:
                self._client.cancel(futures, force=True)
        with suppress(Exception):
            self._client.close(timeout=5)


def _connect(address: Address) -> Client:
    encryption = security(address)
    for name in ("distributed", "distributed.client", "tornado", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are reported as mlcbuild's own messages
    from distributed import Client

    try:
        return Client(
            address.url, timeout=_CONNECT, security=encryption, set_as_default=False, name="mlcbuild"
        )
    except (OSError, TimeoutError, ValueError, RuntimeError) as error:
        why = " ".join(str(error.__cause__ or error).split())[:200]
        raise SetupError(f"no scheduler answers at {address}: {why}; `dask scheduler` starts one") from None
