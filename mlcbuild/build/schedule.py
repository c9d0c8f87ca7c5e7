"""What a run is to do, and what it does first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlcbuild.build.graph import Graph
from mlcbuild.build.plan import Planned, Planner

_UNKNOWN = 0.01
"""Seconds that stand for a step that was never built: what is told as the least that is left must be true."""
_POLL = 0.1
"""Seconds between two looks at a step that another process builds."""


@dataclass(frozen=True)
class Options:
    """How to run. Zero means: what this machine has."""

    jobs: int = 0
    """Cores to share out among steps."""
    memory: int = 0
    """Bytes to share out among steps."""
    keep_going: bool = False
    force: tuple[str, ...] = ()
    """Names or globs of steps to run whatever the store holds."""
    only: tuple[str, ...] = ()
    """Names or globs of the steps wanted; () means all."""
    outputs: tuple[str, ...] = ()
    """Names or globs of steps whose files must be here in the end; () means `only`, or else the steps that
    no other takes as an input. Files of other steps that a remote has come only when a step reads them."""
    executor: str = "pool"
    """ "pool": processes of this machine; "inline": this process; "dask://host:port": a cluster."""
    tls: str | None = None
    """Directory with ca.pem, cert.pem and key.pem, for a cluster that encrypts."""
    handle_signals: bool = False
    """In the main thread, SIGINT and SIGTERM end the run instead of the process."""


def outputs(planner: Planner, options: Options) -> frozenset[str]:
    """The steps whose files must be here in the end. Raises UsageError."""
    if chosen := options.outputs or options.only:
        return planner.graph.match(chosen)
    read = {need for step in planner.steps for need in planner.graph.needs(step)}
    return frozenset(step.name for step in planner.steps if step.name not in read)


@dataclass
class LockWait:
    """A step whose key is locked by another process, or by another step of this run."""

    since: float = field(default_factory=time.monotonic)
    again: float = 0.0
    """When to look at the lock again."""
    is_reported: bool = False

    def postpone(self) -> bool:
        """Sets when to look again. True if it is time to report, once, that the step waits.

        Not at once: a process that only cleans up stale locks holds them for a moment too.
        """
        now = time.monotonic()
        self.again = now + _POLL
        if self.is_reported or now - self.since <= 2 * _POLL:
            return False
        self.is_reported = True
        return True


def weights(graph: Graph, plans: Mapping[str, Planned]) -> dict[str, float]:
    """Seconds, by the last records, from the start of each step to the end of the longest chain after it."""
    found: dict[str, float] = {}
    for name in reversed(graph.nodes):
        if name in plans:
            after = max((found.get(user, 0.0) for user in graph.users[name]), default=0.0)
            found[name] = after + (estimate(plans[name]) or _UNKNOWN)
    return found


def estimate(planned: Planned) -> float | None:
    """Seconds that the step took when it was last built."""
    try:
        return planned.record.made.measured.milliseconds / 1000 if planned.record is not None else None
    except ValueError:
        return None
