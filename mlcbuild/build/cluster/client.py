"""An executor whose workers are those of a dask.distributed cluster.

dask matches jobs with workers, notices dead workers and gives their jobs to others. What this adds: jobs are
text (see `wire`), what no worker can do is found before it is submitted, inputs that a worker cannot get are
given to it through a remote, and nothing is waited for that will not come.
"""

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
"""Seconds that a scheduler gets to answer."""
_WORKERS = 20.0
"""Seconds that the first worker gets to appear."""
_GATHER = 30.0
"""Seconds that an answer gets to arrive once dask says that it is there."""
_CENSUS = 2.0
"""Seconds between two looks at who the workers are."""
_ABSENT = 60.0
"""Seconds that a submitted job may lack a worker that could run it."""
STARTS = 3
"""Times that a job is started: one that kills its worker must not kill them all."""
_SUPPLIES = 3
"""Times that inputs of one job are supplied."""


@dataclass
class _Submitted:
    step: Step
    job: Job
    future: Future[str]
    starts: list[str] = field(default_factory=list)
    """Workers on which it was started, without those that gave it back."""
    attempt: str = ""
    supplies: int = 0
    absent: float | None = None
    """Since when there is no worker for it."""


class Cluster:
    """Raises SetupError when dask is missing, or when no scheduler or no worker can be reached."""

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

    # What there is

    @property
    def cores(self) -> int:
        return max(1, int(sum(found["cores"] for found in self._workers.values())))

    @property
    def memory(self) -> int:
        return int(sum(found["memory"] for found in self._workers.values()))

    @property
    def capacity(self) -> int:
        return self.cores

    def here(self, step: Step) -> bool:
        return not step.shared

    def grant(self, step: Step, wanted: int) -> int:
        """No more cores than a worker has that can run the step."""
        needs = resources(step, 1)
        return min(
            wanted, max((int(w["cores"]) for w in self._workers.values() if able(needs, w)), default=1)
        )

    def refusals(self, steps: Iterable[Step]) -> dict[str, str]:
        """Step -> why no worker can run it, of those that none can."""
        self._census()
        found = {step.name: refusal(step, self._workers) for step in steps if step.shared}
        return {name: f"step {name}: {why}" for name, why in found.items() if why}

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
        """Looks who the workers are; dask's own, which say nothing of cores, are none."""
        found = self._client.scheduler_info(n_workers=-1)["workers"].values()
        self._workers = {
            str(worker["name"]): dict(worker["resources"])
            for worker in found
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
        self._jobs[job.name] = found = _Submitted(step, job, future)
        if before is not None:
            found.starts, found.supplies = before.starts, before.supplies
        future.add_done_callback(partial(self._done, job.name))

    def _done(self, name: str, future: Future[str]) -> None:
        self._heard.put(("done", name, future))
        self._ring()

    def _event(self, event: tuple[float, Any]) -> None:
        """A word of a worker, in dask's thread."""
        told = event[1]
        if isinstance(told, dict) and told.get("run") == self._staging.directory.name:
            self._heard.put((str(told["kind"]), str(told["step"]), told))
            self._ring()

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        found: list[Message] = [*self._local.messages(0.0 if not self._heard.empty() else timeout, wake)]
        ended: dict[str, Future[str]] = {}
        while True:
            try:
                kind, name, told = self._heard.get_nowait()
            except Empty:
                break
            submitted = self._jobs.get(name)
            if submitted is None:
                continue
            if kind == "done":
                if told is submitted.future:
                    ended[name] = told
            elif kind == "supplied":
                found += self._supplied(submitted, told)
            else:
                found += self._hear(submitted, kind, told)
        found += self._answers(ended)
        if time.monotonic() - self._counted > _CENSUS and self._jobs:
            found += self._look_after()
        return found

    def _hear(self, submitted: _Submitted, kind: str, told: dict[str, Any]) -> list[Message]:
        name, log = submitted.job.name, submitted.job.log
        if kind == "start":
            return self._started(submitted, told)
        if told["attempt"] != submitted.attempt:
            return []  # of a worker that was declared dead
        if kind == "progress":
            return [StepProgress(name, int(told["done"]), int(told["total"]), str(told["unit"]))]
        if kind == "log":
            with suppress(OSError), log.open("r+b") as file:
                file.seek(int(told["at"]))
                file.write(str(told["text"]).encode())
        if kind == "stopped" and submitted.starts:
            submitted.starts.pop()
        return []

    def _started(self, submitted: _Submitted, told: dict[str, Any]) -> list[Message]:
        name, worker = submitted.job.name, str(told["site"])
        submitted.attempt = told["attempt"]
        with suppress(OSError):
            submitted.job.log.parent.mkdir(parents=True, exist_ok=True)
            submitted.job.log.write_bytes(b"")
        found: list[Message] = [StepPlaced(name, worker)]
        if submitted.starts:
            found.append(Warned(f"step {name} is run again on {worker}: {submitted.starts[-1]} was lost"))
        submitted.starts.append(worker)
        if len(submitted.starts) > STARTS:
            lost = ", ".join(submitted.starts[:-1])
            found.append(
                self._fail(submitted, f"the workers that ran it were lost, one after the other: {lost}")
            )
        return found

    def _answers(self, ended: Mapping[str, Future[str]]) -> list[Message]:
        """What became of jobs of which dask says that they have ended."""
        if not ended:
            return []
        found: list[Message] = []
        whole = {name: future for name, future in ended.items() if future.status == "finished"}
        texts: dict[str, str] = {}
        with suppress(Exception):  # asked for one by one below
            texts = dict(self._client.gather(whole)) if len(whole) > 1 else {}
        for name, future in ended.items():
            submitted = self._jobs[name]
            try:
                answer = Answer.decode(texts.get(name) or future.result(timeout=_GATHER))
            except Exception as error:  # whatever dask, or another version of this, may raise
                found.append(self._fail(submitted, self._explain(future, error)))
                continue
            found += self._take(submitted, answer)
        return found

    def _explain(self, future: Future[str], error: Exception) -> str:
        kind = type(error).__name__
        if kind == "KilledWorker":
            return (
                f"each worker that ran it was lost, the last one {getattr(error, 'last_worker', '')}: "
                "it may need more memory than it says"
            )
        if future.status in ("cancelled", "lost") or kind in ("CancelledError", "FutureCancelledError"):
            return f"the scheduler {self._address} was lost; what was built is kept, run again"
        return f"{kind} in the cluster: {' '.join(str(error).split())[:300]}"

    def _take(self, submitted: _Submitted, answer: Answer) -> list[Message]:
        name = submitted.job.name
        warnings: list[Message] = [Warned(f"worker {answer.worker}: {words}") for words in answer.warnings]
        if answer.lacking:
            submitted.supplies += 1
            if submitted.supplies > _SUPPLIES:
                why = f"the worker {answer.worker} cannot get its inputs from any remote"
                return [*warnings, self._fail(submitted, why)]
            self._supplier.submit(self._supply, submitted, answer)
            return warnings
        if answer.stopped:
            return [*warnings, self._fail(submitted, f"the worker {answer.worker} stopped it")]
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
        with suppress(Exception):  # dask's connection may be gone
            (submitted.future.release if submitted.future.done() else submitted.future.cancel)()

    def _look_after(self) -> list[Message]:
        """Ends jobs that have long had no worker who could run them."""
        found: list[Message] = []
        try:
            self._census()
        except Exception:  # no scheduler: dask tries to find it again
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
                why = refusal(submitted.step, self._workers) or "no worker has as many cores as it was given"
                found.append(self._fail(submitted, f"{why}; waited for one for {_ABSENT:.0f} seconds"))
        return found

    # Inputs

    def _supply(self, submitted: _Submitted, answer: Answer) -> None:
        """Gives a worker what it lacks, in a thread."""
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
        """Why a file cannot be given; "" when all were. Raises MlcbuildError, CancelledError, OSError."""
        store = self._sharing.store
        for given in job.inputs:
            for entry in given.files:
                if entry.digest not in lacking:
                    continue
                lacking.discard(entry.digest)
                place = store.blob(entry.digest) if given.root is None else Path(given.root, entry.path)
                here = given.root is not None or store.holds(entry.digest, entry.size)
                why = "" if here else self._sharing.fetch(entry, self._stop, lambda _: None)
                if why:
                    return f"{given.argument}/{entry.path} cannot be had: {why}"
                if same_store:
                    part = self._staging.directory / f"give-{entry.digest}"
                    copy(place, part)
                    store.put_blob(entry.digest, part)
                elif not self._sharing.offer(entry, place, self._stop):
                    return f"{given.argument}/{entry.path} cannot be sent to a remote that workers read"
        return ""

    def _supplied(self, submitted: _Submitted, why: str) -> list[Message]:
        if why:
            return [self._fail(submitted, why)]
        if submitted.starts:
            submitted.starts.pop()  # it did not run
        self._submit(submitted.step, submitted.job)
        return []

    def close(self) -> None:
        """Ends what runs, on all workers: they see that their jobs are not wanted any more."""
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
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is told in our own words
    from distributed import Client

    try:
        return Client(
            address.url, timeout=_CONNECT, security=encryption, set_as_default=False, name="mlcbuild"
        )
    except (OSError, TimeoutError, ValueError, RuntimeError) as error:
        why = " ".join(str(error.__cause__ or error).split())[:200]
        raise SetupError(f"no scheduler answers at {address}: {why}; `dask scheduler` starts one") from None
