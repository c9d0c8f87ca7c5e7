"""Defines options for the execution of a run's steps: where they run, and how much of the machine
they use.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild.build.schedule import Options
from mlcbuild.errors import UsageError


@dataclass(frozen=True)
class Execution:
    """Options for running steps: where they run, and with how many cores and how much memory."""

    jobs: int = 0
    """Number of logical CPUs that all running steps share; 0: all that this process may use, or all of the
    cluster."""
    memory: int = 0
    """Bytes of memory that all running steps share; 0: nine tenths of this machine's or container's memory,
    or what the cluster's workers have."""
    keep_going: bool = False
    """True if a run continues after a failed step with the steps that do not need its result; False if no
    further step is started."""
    executor: str = "processes"
    """Where steps run. "processes": in worker processes of this machine; "dask://HOST:PORT": on a cluster;
    "inline": in this process, for debugging, where a step's output is written to its log by redirecting
    descriptors 1 and 2 of the whole process."""
    tls: str | None = None
    """Directory with ca.pem, cert.pem and key.pem, for encrypted connections to a cluster; None: they are
    not encrypted.
    """
    handle_signals: bool = False
    """True if the signals SIGINT and SIGTERM end the run, whose result then names the signal; the run must
    then be in the main thread. False if no signal handler is installed: a KeyboardInterrupt then ends the
    run, and is raised once its workers have ended."""


HERE = Execution()


def options(execution: Execution, force: tuple[str, ...], outputs: tuple[str, ...]) -> Options:
    """Converts a caller's options for running steps into those of the build engine. force: names or globs of
    steps to run even if the store has their results; outputs: names or globs of steps whose files must be on
    this machine at the end, () for the steps that no other step reads. Raises UsageError for an unknown
    executor or a malformed address of a cluster."""
    from mlcbuild.build.cluster import SCHEME, address

    name = {"processes": "pool"}.get(execution.executor, execution.executor)
    if name.startswith(SCHEME):
        name = str(address(name))
    elif name not in ("pool", "inline"):
        raise UsageError(
            f"--executor: '{execution.executor}' must be processes, inline, or {SCHEME}HOST:PORT"
        )
    return Options(
        jobs=execution.jobs,
        memory=execution.memory,
        keep_going=execution.keep_going,
        force=force,
        outputs=outputs,
        executor=name,
        tls=execution.tls,
        handle_signals=execution.handle_signals,
    )
