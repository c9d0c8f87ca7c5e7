"""The events that a run reports while it works. A reporter is any function that accepts one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from mlcbuild.errors import MlcbuildError
from mlcbuild.store.records import Record

INTERRUPTED_BY = "interrupted by "
"""First part of the reason for which an interrupted run skipped a step; the signal's name follows."""
Status: TypeAlias = Literal["built", "reused", "failed", "skipped"]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step in a run: built, reused, failed or skipped, with its record or error."""

    name: str
    status: Status
    key: str | None = None
    seconds: float = 0.0
    reason: str = ""
    """The reason why the step ran or was skipped, in words; "" if none is stated."""
    record: Record | None = None
    error: MlcbuildError | None = None
    log: Path | None = None
    """The path of the log file of a step that ran; None for a step that did not."""
    worker: str = ""
    """Name of the cluster machine that ran the step; "" for this machine."""


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run: one result for each step."""

    steps: tuple[StepResult, ...]
    """One result for each step, in the order of the plan."""
    seconds: float
    interrupted: str = ""
    """The signal that ended the run early, such as SIGINT, or the reason of its Cancellation; "" if it ran to
    the end.
    """
    stopped: tuple[str, ...] = ()
    """Names of the steps that were running when the run was interrupted."""
    not_uploaded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a built step -> remotes to which the upload of its result failed."""

    def count(self, status: Status) -> int:
        return sum(step.status == status for step in self.steps)

    @property
    def ok(self) -> bool:
        return not self.interrupted and all(step.status in {"built", "reused"} for step in self.steps)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of the process for this run: 130 if it was interrupted, else the exit code
        of the first failed step's error, else 0.
        """
        if self.interrupted:
            return 130
        errors = [step.error for step in self.steps if step.error is not None]
        return errors[0].exit_code if errors else 0


@dataclass(frozen=True)
class SourceRead:
    """Event of a run: a large source file is about to be hashed, because it is new or was changed."""

    path: Path
    size: int
    """Size of the source file in bytes."""


@dataclass(frozen=True)
class RunStarted:
    """Event of a run: the plan is complete and the run begins."""

    steps: int
    reused: int
    """Number of steps that do not run because the store or a remote has their results."""
    chains: Mapping[str, float] = field(default_factory=dict)
    """Name of a step to build -> seconds from its start to the end of the longest chain of steps after it,
    estimated from earlier step records.
    """
    hits: frozenset[str] = frozenset()
    """Names of the steps whose results are reused. A step runs after all if its files cannot be
    downloaded.
    """


@dataclass(frozen=True)
class StepStarted:
    """Event of a run: a step begins."""

    name: str
    reason: str
    estimate: float | None
    """Seconds that the step took when it was last built; None if it never was."""
    log: Path
    subject: str = ""
    """The model or other object on which the step works; "" if the step's name already contains it."""
    typical: float = 0.0
    """Seconds that steps with the same kind of work, such as compiling, usually take, by which the duration
    of a first run is estimated; 0 if unknown."""


@dataclass(frozen=True)
class StepPlaced:
    """Event of a run: a cluster worker has started a step."""

    name: str
    worker: str


@dataclass(frozen=True)
class StepWaiting:
    """Event of a run: a step waits because another process builds the same step."""

    name: str
    holder: str
    """The process that builds the step, such as "pid 42", with its host name if it runs on another
    machine.
    """


@dataclass(frozen=True)
class StepFetching:
    """Event of a run: files of a reused step are being downloaded from a remote cache."""

    name: str
    origin: str
    size: int
    """Number of bytes that the download of a result's files will transfer."""


@dataclass(frozen=True)
class StepFetched:
    """Event of a run: a download for a step has ended, successfully or not."""

    name: str


@dataclass(frozen=True)
class Uploading:
    """Event of a run: all steps are done, and results are still being uploaded to remote caches."""

    results: int


@dataclass(frozen=True)
class StepProgress:
    """Event of a run: the progress of a running step, or of a download for it."""

    name: str
    done: int
    total: int
    """The total amount of work, in the unit that this progress report names, such as bytes; 0 if it is
    unknown."""
    unit: str


@dataclass(frozen=True)
class StepFinished:
    """Event of a run: a step has ended, was reused, or was skipped; the event holds its result."""

    result: StepResult
    tail: str = ""
    """The last lines of a failed step's log; "" otherwise."""


@dataclass(frozen=True)
class Warned:
    """Event of a run: a warning that fails no step, such as damage in the store or a step that is not
    reproducible."""

    message: str


@dataclass(frozen=True)
class Noted:
    """Event of a run: a remark that a step made on a choice and its reason. It is not a warning."""

    message: str


@dataclass(frozen=True)
class RunFinished:
    """Event of a run: the run has ended."""

    result: RunResult


Event: TypeAlias = (
    SourceRead
    | RunStarted
    | StepStarted
    | StepPlaced
    | StepWaiting
    | StepFetching
    | StepFetched
    | StepProgress
    | StepFinished
    | Uploading
    | Warned
    | Noted
    | RunFinished
)
Reporter: TypeAlias = Callable[[Event], None]


def silent(event: Event) -> None:
    """Ignores an event of a run. It is the default reporter."""
