"""What a run and its workers write to each other: JSON text, and nothing that could be unpickled.

dask.distributed itself speaks msgpack and pickle with its schedulers and workers; what we hand to it is one
string for each job and one for each answer.
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
"""Of the events that tell how jobs go on. One for all runs, since a scheduler never forgets a topic."""


@dataclass(frozen=True)
class Argument:
    """One input: files by digest, and for a source where it lies on the machine of the run."""

    files: tuple[Entry, ...]
    root: str | None


@dataclass(frozen=True)
class Order:
    """A job for whichever worker gets it."""

    run: str
    """Name of the run's staging area, which a worker with the same store can see there."""
    key: str
    made: Made
    """What the step is; not measured yet."""
    inputs: Mapping[str, Argument]
    cores: int
    again: bool
    """Run it though its result may be known."""
    remotes: tuple[Remote, ...]

    def encode(self) -> str:
        inputs = {
            name: [given.root, [list(_row(e)) for e in given.files]] for name, given in self.inputs.items()
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
        """Raises ValueError when `text` is not an order of this version."""
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise ValueError(f"an order of the format {found.get('format')}, not {FORMAT}")
        remotes = tuple(Remote(**{**row, "trust": tuple(row["trust"])}) for row in found["remotes"])
        inputs = {
            name: Argument(tuple(Entry(*row) for row in rows), root)
            for name, (root, rows) in found["inputs"].items()
        }
        return cls(
            found["run"],
            found["key"],
            Made.from_json(found["made"]),
            inputs,
            found["cores"],
            found["again"],
            remotes,
        )


def order(job: Job, run: str, remotes: tuple[Remote, ...], *, again: bool) -> Order:
    inputs = {
        given.argument: Argument(given.files, None if given.root is None else str(given.root))
        for given in job.inputs
    }
    made = Made(job.name, job.preimage, shared=job.shared)
    return Order(run, job.key, made, inputs, job.cores, again, remotes)


@dataclass(frozen=True)
class Answer:
    """How an order ended on one worker."""

    worker: str
    record: Record | None = None
    key: str = ""
    fault: str = ""
    origin: str = ""
    """The remote that has the files; "" when they are in the run's own store."""
    unsent: tuple[str, ...] = ()
    """Remotes that should have the files and lack them."""
    error: MlcbuildError | None = None
    lacking: tuple[str, ...] = ()
    """Digests of inputs that the worker cannot get; nothing was run."""
    same_store: bool = False
    stopped: bool = False
    """It was told to stop."""
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
        """Raises ValueError."""
        found = json.loads(text)
        data, error = found["record"], found["error"]
        found["record"] = None if data is None else Record.checked(found["key"], data.encode())
        found["error"] = None if error is None else _error(*error)
        lists: dict[str, Any] = {name: tuple(v) for name, v in found.items() if isinstance(v, list)}
        return cls(**{**found, **lists})


def _error(kind: str, message: str) -> MlcbuildError:
    """The error of the same class; one that takes more than a message becomes a StepError."""
    found = getattr(mlcbuild.errors, kind, None)
    if isinstance(found, type) and issubclass(found, MlcbuildError) and "__init__" not in vars(found):
        return found(message)
    return StepError(message)


def _row(entry: Entry) -> tuple[str, str, int]:
    return entry.path, entry.digest, entry.size
