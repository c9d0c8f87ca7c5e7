"""The messages between a run and its workers: JSON text, never pickled objects.

dask.distributed itself uses msgpack and pickle between schedulers and workers; each job and each answer is
passed to it as one string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, get_args

from mlcbuild_format import strict_json

import mlcbuild.errors
from mlcbuild.build.worker import Job
from mlcbuild.canon import Entry
from mlcbuild.errors import InputError, MlcbuildError, StepError
from mlcbuild.remotes import Mode, Remote, fault
from mlcbuild.store.record_form import read_rows
from mlcbuild.store.records import BuildInfo, Record

FORMAT = "mlcbuild-job/1"
TOPIC = "mlcbuild"
"""Name of the dask topic on which workers publish progress events of jobs. All runs share one topic, because
a scheduler never deletes one."""


@dataclass(frozen=True)
class OrderInput:
    """One input of a job that is sent to a cluster worker: paths, digests and sizes of its files."""

    files: tuple[Entry, ...]
    root: str | None
    """Directory of the user's files on the machine that started the run; None if the input is the result of
    an earlier step."""


@dataclass(frozen=True)
class Order:
    """The description of a job, which a run sends to a cluster worker."""

    run: str
    """Name of the run's working directory below the directory tmp/ of its store. A cluster worker that uses
    the same store finds the directory under this name.
    """
    key: str
    info: BuildInfo
    """The build step's name and all that is hashed into its cache key, as a `BuildInfo`, for the record of
    the result; the cluster worker adds the costs that it measures.
    """
    inputs: Mapping[str, OrderInput]
    cores: int
    again: bool
    """True if the job's action runs even if the step's result is in the store."""
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
                "info": self.info.to_json(),
                "inputs": inputs,
                "cores": self.cores,
                "again": self.again,
                "remotes": [asdict(remote) for remote in self.remotes],
            }
        )

    @classmethod
    def decode(cls, text: str) -> Order:
        """Decodes a job for a cluster worker from text. Raises ValueError when `text` is not a job of this
        version.
        """
        fields = _parsed(text, "order")
        if fields.get("format") != FORMAT:
            raise ValueError(f"the order has the format {fields.get('format')}, not {FORMAT}")
        _check(fields, _ORDER, "order")
        remotes = tuple(_remote(row) for row in fields["remotes"])
        inputs = {name: _order_input(name, value) for name, value in fields["inputs"].items()}
        return cls(
            fields["run"],
            fields["key"],
            BuildInfo.from_json(fields["info"]),
            inputs,
            fields["cores"],
            fields["again"],
            remotes,
        )


def order(job: Job, run: str, remotes: tuple[Remote, ...], *, again: bool) -> Order:
    """Describes a job for a cluster worker. run: name of the run's working directory; remotes: the remote
    caches that both the run and the worker can use; again: True if the action runs even if its result exists.
    """
    inputs = {
        item.argument: OrderInput(item.files, None if item.root is None else str(item.root))
        for item in job.inputs
    }
    info = BuildInfo(job.name, job.preimage, shared=job.shared)
    return Order(run, job.key, info, inputs, job.cores, again, remotes)


@dataclass(frozen=True)
class Answer:
    """The answer that a cluster worker returns for one job."""

    worker: str
    record: Record | None = None
    key: str = ""
    fault: str = ""
    origin: str = ""
    """URL of the remote cache that has the files of the job's result; "" if they are in the run's store."""
    unsent: tuple[str, ...] = ()
    """URLs of the remote caches to which the upload of the job's result failed."""
    error: MlcbuildError | None = None
    lacking: tuple[str, ...] = ()
    """Digests of input files of the job that the cluster worker could not obtain; if there are any, it did
    not run the action.
    """
    same_store: bool = False
    """True if the cluster worker uses the same store as the run that sent the job."""
    stopped: bool = False
    """True if the cluster worker was shut down before the job's step ended."""
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
        """Decodes the answer of a cluster worker to a job from text. Raises ValueError when `text` is not an
        answer.
        """
        fields = _check(_parsed(text, "answer"), _ANSWER, "answer")
        data, error = fields["record"], fields["error"]
        fields["record"] = None if data is None else Record.checked(fields["key"], data.encode())
        if error is not None and not (len(error) == 2 and _are_texts(error)):
            raise ValueError("'error' of the answer must be the name of an error and its message")
        fields["error"] = None if error is None else _error(*error)
        for name in ("unsent", "lacking", "warnings"):
            if not _are_texts(fields[name]):
                raise ValueError(f"'{name}' of the answer must be a list of texts")
        lists: dict[str, Any] = {name: tuple(v) for name, v in fields.items() if isinstance(v, list)}
        return cls(**{**fields, **lists})


_Kinds: TypeAlias = Mapping[str, tuple[type, ...]]
"""Name of a field in a JSON message between a run and a cluster worker -> Python types that the field's value
may have.
"""
_NONE = type(None)
_ORDER: _Kinds = {
    "format": (str,),
    "run": (str,),
    "key": (str,),
    "info": (dict,),
    "inputs": (dict,),
    "cores": (int,),
    "again": (bool,),
    "remotes": (list,),
}
_REMOTE: _Kinds = {"url": (str,), "mode": (str,), "ci_only": (bool,), "trust": (list,)}
_ANSWER: _Kinds = {
    "worker": (str,),
    "record": (str, _NONE),
    "key": (str,),
    "fault": (str,),
    "origin": (str,),
    "unsent": (list,),
    "error": (list, _NONE),
    "lacking": (list,),
    "same_store": (bool,),
    "stopped": (bool,),
    "warnings": (list,),
}


def _parsed(text: str, message: str) -> dict[str, Any]:
    """Parses the text of a message between a run and a cluster worker as a JSON object, and returns its
    fields. message: kind of message ("order" or "answer"), which errors name. Raises ValueError for other
    text.
    """
    fields = strict_json.parse(text)
    if not isinstance(fields, dict):
        raise ValueError(f"the {message} is not a JSON object")
    return fields


def _check(fields: dict[str, Any], kinds: _Kinds, message: str) -> dict[str, Any]:
    """Returns the fields of a message between a run and a cluster worker if they are exactly those of `kinds`
    (field's name -> allowed types). message: kind of message, which errors name. Raises ValueError that names
    a missing, unknown or wrong field otherwise.
    """
    wrong = sorted(fields.keys() ^ kinds.keys())
    if wrong:
        verb = "has the unknown" if wrong[0] in fields else "lacks the"
        raise ValueError(f"the {message} {verb} field '{wrong[0][:100]}'")
    for name, allowed in kinds.items():
        if type(fields[name]) not in allowed:
            kind = type(fields[name]).__name__
            raise ValueError(f"'{name}' of the {message} must be {allowed[0].__name__}, not {kind}")
    return fields


def _are_texts(values: list[Any]) -> bool:
    return all(type(value) is str for value in values)


def _remote(row: object) -> Remote:
    """Parses the description of a remote cache, a JSON object, in a job for a cluster worker. Raises
    ValueError if its URL, mode or trusted keys would not be valid in a recipe.
    """
    if not isinstance(row, dict):
        raise ValueError("a remote of the order is not a JSON object")
    fields = _check(row, _REMOTE, "order's remote")
    problem = fault(fields["url"])
    if problem or fields["mode"] not in get_args(Mode) or not _are_texts(fields["trust"]):
        raise ValueError(f"a remote of the order is not valid: {problem or 'its mode or its trust'}")
    return Remote(**{**fields, "trust": tuple(fields["trust"])})


def _order_input(name: str, value: object) -> OrderInput:
    """Parses one input of a job that a run sent to a cluster worker, and returns it as an OrderInput. value:
    the JSON list [directory or null, list of files]; name: the argument's name, for messages. Raises
    ValueError if `value` has another form.
    """
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | None)):
        raise ValueError(f"the input '{name[:100]}' of the order must be a directory or null, and a list")
    return OrderInput(tuple(Entry(*row) for row in read_rows(value[1])), value[0])


def _error(kind: str, message: str) -> MlcbuildError:
    """Returns an error of the class of mlcbuild.errors called `kind`; a StepError if there is no such class,
    or for InputError, which cannot be created from a message.
    """
    error_class = getattr(mlcbuild.errors, kind, None)
    if (
        isinstance(error_class, type)
        and issubclass(error_class, MlcbuildError)
        and not issubclass(error_class, InputError)
    ):
        return error_class(message)
    return StepError(message)


def _row(entry: Entry) -> tuple[str, str, int]:
    return entry.path, entry.digest, entry.size
