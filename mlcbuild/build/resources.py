"""Creates the executor of a run, and tracks how many of its cores and how much of its memory are free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from mlcbuild.build.cluster import address
from mlcbuild.build.executors import Inline, Pool, StepExecutor
from mlcbuild.build.graph import Step
from mlcbuild.build.plan import Planned
from mlcbuild.build.schedule import Options
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.signals import Bell
from mlcbuild.store.locks import HeldLock
from mlcbuild.store.staging import StagingArea


def executor(options: Options, sharing: Sharing, staging: StagingArea, bell: Bell) -> StepExecutor:
    """Returns the executor that the options of a run name. staging: the run's working directory; bell:
    wakes the main loop. Raises UsageError for an unknown executor, and SetupError for an unreachable
    cluster.
    """
    if options.executor == "inline":
        return Inline()
    if options.executor == "pool":
        return Pool(options.jobs)
    from mlcbuild.build.cluster.client import Cluster

    return Cluster(address(options.executor, options.tls), sharing, staging, bell.ring)


@dataclass
class Running:
    """A running step, and the cores and memory that it holds."""

    step: Step
    planned: Planned
    lock: HeldLock
    cores: int
    log: Path
    area: Path | None = None
    """The directory in which the running step works; None until it is created."""
    started: float = field(default_factory=time.monotonic)


class Capacity:
    """Tracks which cores and how much memory of an executor the running steps hold."""

    def __init__(self, executor: StepExecutor, options: Options) -> None:
        self._executor = executor
        self._options = options
        self._held: dict[str, tuple[int, int]] = {}
        self._alone = False
        """True while a step that must run alone is running."""

    def open(self) -> bool:
        """Returns True if the executor has a free core and place for one more step, whatever memory the
        step needs.
        """
        return not self._held or (self._cores() > 0 and len(self._held) < self._executor.capacity)

    def fits(self, step: Step) -> bool:
        """Returns True if the executor has the memory that a step needs.

        A step that needs more than all memory, or that is marked `alone`, fits only while no other step
        runs.
        """
        memory = self._options.memory or self._executor.memory
        if step.alone or self._alone:
            return not self._held
        return not self._held or step.memory <= memory - sum(held for _, held in self._held.values())

    def take(self, step: Step, others: int) -> int:
        """Reserves cores and memory for a step that starts, and returns the number of cores. others: number
        of further steps that wait to start.
        """
        share = max(1, min(step.cores, self._cores() // (others + 1)))
        granted = self._executor.grant(step, share)
        self._held[step.name] = granted, step.memory
        self._alone = step.alone
        return granted

    def give_back(self, step: Step) -> None:
        del self._held[step.name]
        self._alone = False

    def _cores(self) -> int:
        return (self._options.jobs or self._executor.cores) - sum(cores for cores, _ in self._held.values())
