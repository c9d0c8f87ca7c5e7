"""The options of a run, estimates of step times, and waiting for locks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlcbuild.build.graph import Graph
from mlcbuild.build.plan import Planned, Planner

_UNKNOWN = 0.01
"""Estimated seconds of a step that was never built. It is small because the estimate for a whole run is a
lower bound.
"""
_POLL = 0.1
"""Seconds between two attempts to acquire a lock that another process holds."""


@dataclass(frozen=True)
class Options:
    """The options of a run. 0 cores or 0 bytes stand for everything that this machine has."""

    jobs: int = 0
    """Number of cores that steps may use together; 0: all of this machine."""
    memory: int = 0
    """Bytes of memory that steps may use together; 0: those of this machine."""
    keep_going: bool = False
    force: tuple[str, ...] = ()
    """Names or globs of steps to run even if the store has their results."""
    only: tuple[str, ...] = ()
    """Names or globs of the steps to build; () means all."""
    outputs: tuple[str, ...] = ()
    """Names or globs of steps whose files must be on this machine at the end.

    () means the steps that `only` names, or else the steps that no other step reads. Files of other steps
    stay in the remote cache that has them until a step on this machine reads them.
    """
    executor: str = "pool"
    """Where steps run: "pool" in processes of this machine, "inline" in this process, "dask://host:port" on a
    cluster."""
    tls: str | None = None
    """Directory with ca.pem, cert.pem and key.pem, for an encrypted connection to the cluster; None: it is
    not encrypted.
    """
    handle_signals: bool = False
    """True if SIGINT and SIGTERM end the run instead of the process. The run must then be in the
    main thread.
    """


def outputs(planner: Planner, options: Options) -> frozenset[str]:
    """Returns the names of the steps whose files must be on this machine at the end of a run. Raises
    UsageError for a name that no step has.
    """
    if chosen := options.outputs or options.only:
        return planner.graph.match(chosen)
    read = {need for step in planner.steps for need in planner.graph.needs(step)}
    return frozenset(step.name for step in planner.steps if step.name not in read)


@dataclass
class LockWait:
    """The wait of a step for the lock of its key, which another process or another step of this run holds."""

    since: float = field(default_factory=time.monotonic)
    again: float = 0.0
    """Monotonic time, in seconds, of the next attempt to acquire the lock of a step that another process
    builds."""
    is_reported: bool = False

    def postpone(self) -> bool:
        """Schedules the next attempt to acquire the lock. Returns True once, when the wait is long enough to
        be reported.

        A short wait is not reported, because a process that removes stale locks also holds them for a moment.
        """
        now = time.monotonic()
        self.again = now + _POLL
        if self.is_reported or now - self.since <= 2 * _POLL:
            return False
        self.is_reported = True
        return True


def weights(graph: Graph, plans: Mapping[str, Planned]) -> dict[str, float]:
    """Returns step name -> estimated seconds from the step's start to the end of the longest chain of steps
    after it.
    """
    weights: dict[str, float] = {}
    for name in reversed(graph.nodes):
        if name in plans:
            after = max((weights.get(user, 0.0) for user in graph.users[name]), default=0.0)
            weights[name] = after + (estimate(plans[name]) or _UNKNOWN)
    return weights


def estimate(planned: Planned) -> float | None:
    """Returns the seconds that a step took when it was last built, according to its plan; None if it never
    was.
    """
    try:
        return planned.record.info.measured.milliseconds / 1000 if planned.record is not None else None
    except ValueError:
        return None
