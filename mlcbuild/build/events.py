"""What a run tells while it goes on. A reporter is any function that takes an Event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from mlcbuild.errors import MlcbuildError
from mlcbuild.store.records import Record

Status: TypeAlias = Literal["built", "reused", "failed", "skipped"]


@dataclass(frozen=True)
class StepResult:
    """How one step ended."""

    name: str
    status: Status
    key: str | None = None
    seconds: float = 0.0
    reason: str = ""
    """Why it ran, or why it was skipped."""
    record: Record | None = None
    error: MlcbuildError | None = None
    log: Path | None = None
    """The log of a step that ran."""
    worker: str = ""
    """The machine of a cluster that ran it; "" for this one."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    steps: tuple[StepResult, ...]
    """In the order of the plan."""
    seconds: float
    interrupted: str = ""
    """Who ended the run early: a signal such as SIGINT, or the reason of its Cancellation."""
    stopped: tuple[str, ...] = ()
    """Steps that were running when the signal came."""
    not_uploaded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Built step -> the remotes that should have its result and lack it."""

    def count(self, status: Status) -> int:
        return sum(step.status == status for step in self.steps)

    @property
    def ok(self) -> bool:
        return not self.interrupted and all(step.status in {"built", "reused"} for step in self.steps)

    @property
    def exit_code(self) -> int:
        """0, or 130 when interrupted, or what the first failed step's error says."""
        if self.interrupted:
            return 130
        errors = [step.error for step in self.steps if step.error is not None]
        return errors[0].exit_code if errors else 0


@dataclass(frozen=True)
class SourceRead:
    """A large file of a source is about to be hashed, because it is new or was changed."""

    path: Path
    size: int


@dataclass(frozen=True)
class RunStarted:
    steps: int
    reused: int
    """Steps that are hits already."""
    chains: Mapping[str, float] = field(default_factory=dict)
    """Step that is left -> seconds, by the last records, from its start to the end of what hangs on it."""


@dataclass(frozen=True)
class StepStarted:
    name: str
    reason: str
    estimate: float | None
    """Seconds it took last time."""
    log: Path


@dataclass(frozen=True)
class StepPlaced:
    """A worker of a cluster has begun a step."""

    name: str
    worker: str


@dataclass(frozen=True)
class StepWaiting:
    """Another process builds the same step."""

    name: str
    holder: str
    """ "pid 42", perhaps with its host."""


@dataclass(frozen=True)
class StepFetching:
    """Files of a step that need not run are on their way from a remote."""

    name: str
    origin: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class StepFetched:
    """What was on its way for a step is here, or will not come."""

    name: str


@dataclass(frozen=True)
class Uploading:
    """All steps are done; results are still being sent to remotes."""

    results: int


@dataclass(frozen=True)
class StepProgress:
    name: str
    done: int
    total: int
    """0: not known."""
    unit: str


@dataclass(frozen=True)
class StepFinished:
    result: StepResult
    tail: str = ""
    """The last lines of a failed step's log."""


@dataclass(frozen=True)
class Warned:
    """Something the user should know that fails nothing: damage met in the store, an unreproducible step."""

    message: str


@dataclass(frozen=True)
class Noted:
    """A fact about what is chosen and why, which is no warning."""

    message: str


@dataclass(frozen=True)
class RunFinished:
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
    """The reporter that says nothing."""
