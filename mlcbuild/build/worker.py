"""Runs one build step, in this process or a worker process, from linking its inputs to publishing the record
of its result.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild_format import regular

from mlcbuild import progress
from mlcbuild.canon import Entry, bytes_digest, forget_digests, module_path, note_digest
from mlcbuild.errors import MlcbuildError, StepError, safe_lines
from mlcbuild.store.blobs import is_full
from mlcbuild.store.records import BuildInfo, Measured, Preimage, Record
from mlcbuild.store.staging import remove_tree
from mlcbuild.store.stamp import STAMP_NS
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

RETIRE_BYTES = 1 << 30
"""Maximum resident memory, in bytes, that a worker process may still hold after a build step. A process that
holds more is replaced by a new one, because the memory limits of later steps do not count what earlier steps
left behind.
"""
_TAIL_BYTES, _TAIL_LINES = 8192, 20
REMARK = "note: "
"""Prefix of those lines in a build step's log that the run shows as remarks."""


@dataclass(frozen=True)
class JobInput:
    """One argument of a build step's action: its files, and the directory that holds them."""

    argument: str
    files: tuple[Entry, ...]
    root: Path | None = None
    """Directory of the user that holds the input's files; None if they are the result of another step, whose
    files are hard-linked from the store into the job's directory.
    """
    stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of a source file of the input -> (its size in bytes, its mtime in ns) at the time when it was
    hashed.
    """


@dataclass(frozen=True)
class Job:
    """Everything that a worker process needs to run one build step. It can be pickled."""

    name: str
    key: str
    preimage: Preimage
    inputs: tuple[JobInput, ...]
    cores: int
    store: Path
    area: Path
    """A new, empty directory for the job, which is deleted after the job."""
    log: Path
    shared: bool = True
    again: bool = False
    """True if the job's step runs even if the store has its result."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job, which is one execution of a step: the record of its result, or an error."""

    name: str
    record: Record | None = None
    fault: str = ""
    """A warning about the result of the job, such as a second, different result for the same cache key; "" if
    there is none.
    """
    error: MlcbuildError | None = None
    retire: bool = False
    """True if the worker process ends after the job, because it holds too much memory."""
    worker: str = ""
    """Name of the cluster machine that ran the job; "" for this machine."""
    origin: str = ""
    """URL of the remote cache that has the files of the job's result; "" if they are in the store."""
    unsent: tuple[str, ...] = ()
    """URLs of the remote caches to which the upload of the job's result failed."""


def perform(job: Job) -> Outcome:
    """Runs the action of a job, publishes the files that it wrote in the store, deletes the job's directory,
    and returns the outcome. An error of the action becomes part of the outcome.
    """
    store = Store(job.store)
    try:
        with store.writing(), _logged(job.log, job.area):
            return _attempt(job, store)
    except MlcbuildError as error:
        return Outcome(job.name, error=error)
    finally:
        forget_digests()
        remove_tree(job.area)


def _attempt(job: Job, store: Store) -> Outcome:
    try:
        published = _build(job, store)
    except MlcbuildError as error:
        sys.stderr.write(safe_lines(f"{type(error).__name__}: {error}\n"))
        return Outcome(job.name, error=_portable(error))
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and is_full(error):
            return Outcome(job.name, error=store.explain(error))
        sys.stderr.write(safe_lines(traceback.format_exc()))
        words = " ".join(str(error).split())[:300]
        return Outcome(
            job.name,
            error=StepError(
                f"step {job.name} stopped with {type(error).__name__}: {words}; traceback in {job.log}"
            ),
        )
    return published


def _build(job: Job, store: Store) -> Outcome:
    started = time.monotonic()
    out, temporary = job.area / "out", job.area / "tmp"
    out.mkdir()
    temporary.mkdir()
    arguments, linked = _stage(job, store)
    module, _, function = job.preimage.action.partition(":")
    cost = _Cost()
    with _environment(MLCBUILD_CORES=str(job.cores), TMPDIR=str(temporary)):
        action: Callable[[object, object, Path], None] = getattr(importlib.import_module(module), function)
        action(dict(job.preimage.params), arguments, out)
    _check_inputs(job, arguments)
    _check_code(job)
    measured = replace(cost.measured(), milliseconds=round((time.monotonic() - started) * 1000))
    info = BuildInfo(job.name, job.preimage, measured, job.shared)
    published = store.publish(job.key, info, out, linked)
    return Outcome(job.name, published.record, published.fault)


def _stage(job: Job, store: Store) -> tuple[dict[str, Path], dict[tuple[int, int], Entry]]:
    """Makes the input files of a job readable for the step's action: hard-links those in the store into the
    job's directory, and leaves the user's files where they are.

    Returns (argument of the action -> directory of its files, (device, inode) of each linked file -> its
    path, digest and size as an Entry).
    """
    arguments: dict[str, Path] = {}
    linked: dict[tuple[int, int], Entry] = {}
    for job_input in job.inputs:
        if job_input.root is not None:
            arguments[job_input.argument] = job_input.root
            continue
        directory = arguments[job_input.argument] = job.area / "in" / job_input.argument
        directory.mkdir(parents=True)
        store.link_out(job_input.files, directory)
        for entry in job_input.files:
            stat = (directory / entry.path).stat()
            linked[stat.st_dev, stat.st_ino] = entry
            note_digest(directory / entry.path, entry.digest)
    return arguments, linked


def _check_inputs(job: Job, arguments: dict[str, Path]) -> None:
    """Raises StepError if a source file of a job was changed after it was hashed. arguments: name of an
    argument of the action -> directory of its files.
    """
    for job_input in job.inputs:
        for entry in job_input.files:
            path = arguments[job_input.argument] / entry.path
            try:
                stat = path.stat()
                same = (stat.st_size, stat.st_mtime_ns) == job_input.stats.get(
                    entry.path, (entry.size, STAMP_NS)
                )
            except OSError:
                same = False
            if not same:
                changed_file = path if job_input.root else f"its input {job_input.argument}/{entry.path}"
                raise StepError(
                    f"step {job.name}: {changed_file} changed while the step ran; nothing was kept, run again"
                )


def _check_code(job: Job) -> None:
    for name, digest in job.preimage.code.items():
        dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        path = module_path(dotted)
        if path is None or not path.is_file() or bytes_digest(path.read_bytes()) != digest:
            raise StepError(
                f"step {job.name}: {name} changed while the step ran; nothing was kept, run again"
            )


def _portable(error: MlcbuildError) -> MlcbuildError:
    """Returns the error itself or, if it cannot be pickled for another process, a StepError with the same
    message.
    """
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # the type of `error`
    except Exception:
        return StepError(str(error))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    _forget_temporary_directory()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _forget_temporary_directory()


def _forget_temporary_directory() -> None:
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]  # tempfile caches TMPDIR there


@contextmanager
def _logged(log: Path, area: Path) -> Iterator[None]:
    """Returns a context in which output to descriptors 1 and 2 of this process, native output included, goes
    to a new log file. area: directory of the job.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # Removed with the session's directory if this process is killed.
    part = area.with_name(f"{area.name}.log")
    target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    part.replace(log)  # A process that runs another step of this name keeps its own log file.
    _flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        # Under a test runner, Python's streams may differ from descriptors 1 and 2.
        with (
            open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as out,
            open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as err,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            yield
    finally:
        _flush()
        for descriptor, old in enumerate(saved, start=1):
            os.dup2(old, descriptor)
            os.close(old)


def tail(log: Path | None) -> str:
    """Returns the last lines of a step's log file, at most 20 lines and 8192 bytes; "" if there is no
    file.
    """
    if log is None or not log.is_file():
        return ""
    with regular.open_file(log) as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def remarks(log: Path | None) -> list[str]:
    """Returns the remarks at the beginning of a step's log file: the text after "note: " in each line that
    begins so, at most 20; [] when there is no log.
    """
    if log is None or not log.is_file():
        return []
    with regular.open_file(log) as file:
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    return [line.removeprefix(REMARK) for line in lines if line.startswith(REMARK)][:_TAIL_LINES]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    _libc().fflush(None)  # writes native output that libc still buffers


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _Cost:
    """Measures CPU time and peak memory of this process and its children since the object was created."""

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
        self._cpu = _cpu_seconds()
        self._children = _child_peak()

    def measured(self) -> Measured:
        peak, children = _own_peak(), _child_peak()
        if children > self._children:
            peak = max(peak, children)
        return Measured(0, round((_cpu_seconds() - self._cpu) * 1000), peak)


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Number of bytes in one unit of getrusage's ru_maxrss, which differs between systems."""


def _child_peak() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _RSS_UNIT


def _own_peak() -> int:
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _status_bytes(field_name: str) -> int:
    """Returns a field of Linux's /proc/self/status, such as "VmHWM", converted to bytes; 0 on systems without
    that file.
    """
    with suppress(OSError), Path("/proc/self/status").open() as status:
        for line in status:
            if line.startswith(field_name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def serve(descriptor: int) -> None:
    """Runs a worker process: executes the jobs that arrive on a connection until it closes. descriptor:
    file descriptor of the connection.

    Standard input is a pipe whose other end only the parent process holds. When it closes, the parent has
    ended, and this process kills itself and all processes that it started.
    """
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    life = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    connection: Connection[object, Job | None] = Connection(descriptor)
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            connection.send(message)

    with suppress(EOFError, ConnectionError):
        while (job := connection.recv()) is not None:
            progress.listen(partial(_pass_on, send))
            outcome = perform(job)
            progress.listen(None)
            outcome = replace(outcome, retire=_status_bytes("VmRSS") > RETIRE_BYTES)
            send(outcome)
            if outcome.retire:
                return


def _pass_on(send: Callable[[object], None], done: int, total: int, unit: str) -> None:
    with suppress(OSError):
        send((done, total, unit))


def _end_with_parent(life: int) -> None:
    os.read(life, 1)
    os.killpg(0, signal.SIGKILL)  # This process leads a process group.
