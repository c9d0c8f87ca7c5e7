"""The messages between a run and its workers: JSON text, never pickled objects.

dask.distributed itself uses msgpack and pickle between schedulers and workers; each job and each answer is
passed to it as one string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import mlcbuild.errors
from mlcbuild.build.worker import Job
from mlcbuild.canon import Entry
from mlcbuild.errors import MlcbuildError, StepError
from mlcbuild.remotes import Remote
from mlcbuild.store.records import Made, Record

FORMAT = "mlcbuild-job/1"
TOPIC = "mlcbuild"
"""Topic of the progress events of jobs. All runs share one, because a scheduler never deletes a topic."""


@dataclass(frozen=True)
class OrderInput:
    """One input of an order: its files by digest."""

    files: tuple[Entry, ...]
    root: str | None
    """Directory of a source on the machine of the run; None for an artifact."""


@dataclass(frozen=True)
class Order:
    """A job that any worker may run."""

    run: str
    """Name of the run's staging area; a worker with the same store finds its directory there."""
    key: str
    made: Made
    """Description of the step, without measurements."""
    inputs: Mapping[str, OrderInput]
    cores: int
    again: bool
    """Runs the action even if its result is in the store."""
    remotes: tuple[Remote, ...]

    def encode(self) -> str:
        inputs = {
            name: [item.root, [list(_row(e)) for e in item.files]] for name, item in self.inputs.items()
        }
        return json.dumps(
            {
                "format": FORMAT,
                "run": self.run,
                "key": self.key,
                "made": self.made.to_json(),
                "inputs": inputs,
                "cores": self.cores,
                "again": self.again,
                "remotes": [asdict(remote) for remote in self.remotes],
            }
        )

    @classmethod
    def decode(cls, text: str) -> Order:
        """Decodes an order. Raises ValueError when `text` is not an order of this version."""
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise ValueError(f"the order has the format {fields.get('format')}, not {FORMAT}")
        remotes = tuple(Remote(**{**row, "trust": tuple(row["trust"])}) for row in fields["remotes"])
        inputs = {
            name: OrderInput(tuple(Entry(*row) for row in rows), root)
            for name, (root, rows) in fields["inputs"].items()
        }
        return cls(
            fields["run"],
            fields["key"],
            Made.from_json(fields["made"]),
            inputs,
            fields["cores"],
            fields["again"],
            remotes,
        )


def order(job: Job, run: str, remotes: tuple[Remote, ...], *, again: bool) -> Order:
    """Returns the order for a job of the session `run`; `again` runs it even if its result is known."""
    inputs = {
        item.argument: OrderInput(item.files, None if item.root is None else str(item.root))
        for item in job.inputs
    }
    made = Made(job.name, job.preimage, shared=job.shared)
    return Order(run, job.key, made, inputs, job.cores, again, remotes)


@dataclass(frozen=True)
class Answer:
    """The outcome of an order on one worker."""

    worker: str
    record: Record | None = None
    key: str = ""
    fault: str = ""
    origin: str = ""
    """The remote that has the files; "" when they are in the run's own store."""
    unsent: tuple[str, ...] = ()
    """Remotes that did not receive the files although they should have."""
    error: MlcbuildError | None = None
    lacking: tuple[str, ...] = ()
    """Digests of inputs that the worker cannot get; the action was not run."""
    same_store: bool = False
    """True when the worker uses the store of the run."""
    stopped: bool = False
    """True when the worker ended before the step did."""
    warnings: tuple[str, ...] = field(default=())

    def encode(self) -> str:
        error = self.error
        return json.dumps(
            {
                "worker": self.worker,
                "record": None if self.record is None else self.record.encode().decode(),
                "key": self.key,
                "fault": self.fault,
                "origin": self.origin,
                "unsent": self.unsent,
                "error": None if error is None else [type(error).__name__, str(error)],
                "lacking": self.lacking,
                "same_store": self.same_store,
                "stopped": self.stopped,
                "warnings": self.warnings,
            }
        )

    @classmethod
    def decode(cls, text: str) -> Answer:
        """Decodes an answer. Raises ValueError when `text` is not one."""
        fields = json.loads(text)
        data, error = fields["record"], fields["error"]
        fields["record"] = None if data is None else Record.checked(fields["key"], data.encode())
        fields["error"] = None if error is None else _error(*error)
        lists: dict[str, Any] = {name: tuple(v) for name, v in fields.items() if isinstance(v, list)}
        return cls(**{**fields, **lists})


def _error(kind: str, message: str) -> MlcbuildError:
    """Returns an error of the class named `kind`, or a StepError when that class takes more than a
    message."""
    error_class = getattr(mlcbuild.errors, kind, None)
    if (
        isinstance(error_class, type)
        and issubclass(error_class, MlcbuildError)
        and "__init__" not in vars(error_class)
    ):
        return error_class(message)
    return StepError(message)


def _row(entry: Entry) -> tuple[str, str, int]:
    return entry.path, entry.digest, entry.size
