"""Where jobs run: in this process, or in worker processes. An executor says nothing and decides nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mlcbuild import machine
from mlcbuild.build.events import StepPlaced, StepProgress, Warned
from mlcbuild.build.graph import Step
from mlcbuild.build.worker import Job, Outcome, perform
from mlcbuild.errors import StepError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Message: TypeAlias = Outcome | StepProgress | StepPlaced | Warned


class Executor(Protocol):
    @property
    def capacity(self) -> int:
        """How many jobs it can have at once."""

    @property
    def cores(self) -> int:
        """To share out among jobs."""

    @property
    def memory(self) -> int:
        """Bytes to share out among jobs."""

    def here(self, step: Step) -> bool:
        """Whether it runs on this machine, so that its inputs must be in the store before it starts."""

    def grant(self, step: Step, wanted: int) -> int:
        """How many of the wanted cores a step can have."""

    def refusals(self, steps: Iterable[Step]) -> Mapping[str, str]:
        """Step -> the sentence that says why it can never be started."""

    def start(self, job: Job, step: Step) -> None:
        """Takes the job of a step. Its outcome comes from `messages`, whatever happens to it."""

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        """What happened, after waiting up to `timeout` seconds or until the descriptor `wake` is readable."""

    def close(self) -> None:
        """Ends all workers at once, with what they run."""


class _Here:
    """What the executors on this machine have in common."""

    def __init__(self, capacity: int) -> None:
        self.cores = machine.cores()
        self.capacity = capacity or self.cores
        self.memory = machine.memory()

    def here(self, step: Step) -> bool:
        return True

    def grant(self, step: Step, wanted: int) -> int:
        return wanted

    def refusals(self, steps: Iterable[Step]) -> Mapping[str, str]:
        return {}


class Inline(_Here):
    """Runs a job in this process when it is started: for debugging, and where processes cannot be had."""

    def __init__(self) -> None:
        super().__init__(1)
        self._done: list[Message] = []

    def start(self, job: Job, step: Step | None = None) -> None:
        self._done.append(perform(job))

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        done, self._done = self._done, []
        if not done and timeout:
            import select

            select.select([wake], [], [], timeout)
        return done

    def close(self) -> None:
        return


# Arguments: descriptor of the connection, then this process's module path, so that a worker imports the
# same code whatever the environment says, and tells nothing of it to the processes it starts itself.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from mlcbuild.build.worker import serve; serve(int(sys.argv[1]))"
)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Job | None, Outcome | tuple[int, int, str]]
    job: Job | None = None
    actions: set[str] = field(default_factory=set)
    """What it ran before: modules that are loaded already."""

    def take(self, job: Job) -> bool:
        """Whether the job could be sent."""
        self.job = job
        self.actions.add(job.preimage.action)
        try:
            self.connection.send(job)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Kills the worker and every process it started."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Pool(_Here):
    """Spawned processes that are kept from job to job; as many as there were jobs at once.

    A worker that dies fails its job with a sentence and is replaced by the next job. When this process
    dies, however it does, the workers end: see `worker.serve`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._workers: list[_Worker] = []

    def start(self, job: Job, step: Step | None = None) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        for worker in sorted(idle, key=lambda worker: job.preimage.action not in worker.actions):
            if worker.take(job):
                return
            self._drop(worker)  # it died while idle
        worker = _spawn()
        self._workers.append(worker)
        worker.take(job)  # one that died already shows as a closed connection in `messages`

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        from multiprocessing.connection import wait

        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        ready = wait([*busy, wake], timeout)
        found: list[Message] = []
        for connection, worker in busy.items():
            dead = worker.process.poll() is not None
            if connection in ready or dead:
                found += self._receive(worker, dead)
        return found

    def _receive(self, worker: _Worker, dead: bool) -> list[Message]:
        found: list[Message] = []
        job = worker.job
        assert job is not None  # only busy workers are asked
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, Outcome):
                    worker.job = None
                    if message.retire:
                        self._drop(worker)
                    return [*found, message]
                found.append(StepProgress(job.name, *message))
        except (EOFError, OSError):
            dead = True
        if dead:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)
            code = worker.process.returncode
            self._drop(worker)
            found.append(Outcome(job.name, error=StepError(_obituary(job, code))))
        return found

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def close(self) -> None:
        while self._workers:
            self._drop(self._workers[-1])


_FIXED = {
    # One order of sets for every build: a cheap part of reproducible results.
    "PYTHONHASHSEED": "0",
    # Linear algebra on one thread for each of ours: sums in one order, and no threads that spin for cores
    # which belong to other steps.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


def _spawn() -> _Worker:
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # a Ctrl-C is ours to answer, and the group is ended as one
        env={**os.environ, **_FIXED},
    )
    theirs.close()
    return _Worker(process, ours)


def _obituary(job: Job, code: int | None) -> str:
    if code is None:
        how = "closed its connection"
    elif code >= 0:
        how = f"ended with exit code {code}"
    else:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "an unknown signal"
        how = f"was killed by {name} (signal {-code})"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out: try fewer --jobs or a smaller --memory"
    return f"step {job.name}: its worker process {how}; log: {job.log}"
