"""Executors run jobs (single build steps), in this process or in worker processes. They schedule nothing and
report nothing.
"""

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


class StepExecutor(Protocol):
    """The interface of executors, which run jobs (single build steps) on this or on other machines and return
    the outcomes.
    """

    @property
    def capacity(self) -> int:
        """Returns the maximum number of jobs that this executor runs at the same time."""

    @property
    def cores(self) -> int:
        """Returns the number of cores that all running jobs may use together."""

    @property
    def memory(self) -> int:
        """Returns the number of bytes of memory that all running jobs may use together."""

    def here(self, step: Step) -> bool:
        """Returns True if this executor would run a build step on this machine, so that the step's inputs
        must be in this machine's store beforehand.
        """

    def grant(self, step: Step, cores: int) -> int:
        """Returns the number of CPU cores that a build step gets from this executor, at most the requested
        number `cores`.
        """

    def refusals(self, steps: Iterable[Step]) -> Mapping[str, str]:
        """Returns name of a build step -> error message, for those of `steps` that this executor can never
        run.
        """

    def start(self, job: Job, step: Step) -> None:
        """Starts the job of a build step without waiting for it. The method `messages` later returns its
        outcome, also when the job crashes.
        """

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        """Returns the messages of this executor's jobs since the last call: StepProgress, StepPlaced (a
        cluster worker has started the step), Warned, and one Outcome for each job that has ended.

        Waits up to `timeout` seconds for a message, or until the file descriptor `wake` is readable.
        """

    def close(self) -> None:
        """Kills all worker processes and the jobs that they run."""


class _Here:
    """An executor on this machine. capacity: maximum number of jobs at once; 0 means one for each CPU
    core.
    """

    def __init__(self, capacity: int) -> None:
        self.cores = machine.cores()
        self.capacity = capacity or self.cores
        self.memory = machine.memory()

    def here(self, step: Step) -> bool:
        return True

    def grant(self, step: Step, cores: int) -> int:
        return cores

    def refusals(self, steps: Iterable[Step]) -> Mapping[str, str]:
        return {}


class Inline(_Here):
    """An executor that runs each job in this process as soon as it is started: for debugging, and for
    systems that allow no child processes.
    """

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


# Its arguments are the file descriptor of the connection, then this process's module path. So a worker
# imports the same code whatever its environment says, and does not pass the path on to its child processes.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from mlcbuild.build.worker import serve; serve(int(sys.argv[1]))"
)


@dataclass
class _Worker:
    """A worker process of this machine, and the connection over which it receives jobs."""

    process: subprocess.Popen[bytes]
    connection: Connection[Job | None, Outcome | tuple[int, int, str]]
    job: Job | None = None
    actions: set[str] = field(default_factory=set)
    """Actions that this worker process has run, whose modules are therefore loaded."""

    def take(self, job: Job) -> bool:
        """Sends a job to this worker process and returns True; returns False if the process is dead."""
        self.job = job
        self.actions.add(job.preimage.action)
        try:
            self.connection.send(job)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Kills the worker process and all processes that it started."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Pool(_Here):
    """An executor that runs jobs in worker processes, which are reused for later jobs.

    It starts a worker only when no existing one is idle. If a worker dies, its job fails with an error
    message, and the next job starts a new worker. When this process dies, for whatever reason, the workers
    end as well: see `worker.serve`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._workers: list[_Worker] = []
        self._refused: list[Message] = []
        """Outcomes of jobs for which no worker process could be started, until `messages` returns them."""

    def start(self, job: Job, step: Step | None = None) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        for worker in sorted(idle, key=lambda worker: job.preimage.action not in worker.actions):
            if worker.take(job):
                return
            self._drop(worker)  # the worker died while it was idle
        try:
            worker = _spawn()
        except OSError as error:  # the limit of processes or open files is reached
            why = f"no worker process can be started: {error.strerror or error}; try fewer --jobs"
            self._refused.append(Outcome(job.name, error=StepError(f"step {job.name}: {why}")))
            return
        self._workers.append(worker)
        worker.take(job)  # if the worker has died already, `messages` sees a closed connection

    def messages(self, timeout: float, wake: int) -> Sequence[Message]:
        from multiprocessing.connection import wait

        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        ready = wait([*busy, wake], 0 if self._refused else timeout)
        messages, self._refused = self._refused, []
        for connection, worker in busy.items():
            dead = worker.process.poll() is not None
            if connection in ready or dead:
                messages += self._receive(worker, dead)
        return messages

    def _receive(self, worker: _Worker, dead: bool) -> list[Message]:
        messages: list[Message] = []
        job = worker.job
        assert job is not None  # only busy workers are polled
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, Outcome):
                    worker.job = None
                    if message.retire:
                        self._drop(worker)
                    return [*messages, message]
                messages.append(StepProgress(job.name, *message))
        except (EOFError, OSError):
            dead = True
        if dead:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)
            code = worker.process.returncode
            self._drop(worker)
            messages.append(Outcome(job.name, error=StepError(_obituary(job, code))))
        return messages

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def close(self) -> None:
        while self._workers:
            self._drop(self._workers[-1])


_FIXED = {
    # The order of sets is then the same in every build: an inexpensive part of reproducible results.
    "PYTHONHASHSEED": "0",
    # One thread of linear algebra per job: sums are added in one order, and no thread spins on cores that
    # belong to other steps.
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
        start_new_session=True,  # This process handles Ctrl-C, and the whole group is killed at once.
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
