"""What a store remembers of a step: the whole pre-image of its key, and the files it made.

A record is two lines of canonical JSON. The first says what was made and is all that a run without work
reads; the second says from what and how, for `explain`, reasons and audits:

    {"files":[[path,digest,size],...],"format":"record/1","tree":digest}
    {"action":...,"code":{path:digest},"inputs":{argument:[[path,digest,size],...]},"measured":{...},...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from mlcbuild.canon import Entry, Json, Tree, canonical, salt, step_key, tree_digest

FORMAT = "record/1"


@dataclass(frozen=True)
class Preimage:
    """Everything that enters a step's key."""

    action: str
    params: Mapping[str, Json]
    code: Mapping[str, str]
    """Source file of the action's import closure -> digest."""
    tools: Mapping[str, str]
    inputs: Mapping[str, Tree]
    """Argument -> the files that it selects."""

    def key(self) -> str:
        digests = {argument: tree.digest for argument, tree in self.inputs.items()}
        return step_key(self.action, canonical(self.params), salt(self.code, self.tools), digests)


@dataclass(frozen=True)
class Measured:
    """What one run of a step cost. Whole numbers, because records are canonical JSON."""

    milliseconds: int = 0
    cpu_milliseconds: int = 0
    peak_bytes: int = 0
    """The most memory the step's process held; where the system cannot tell, an upper bound of it."""


@dataclass(frozen=True)
class Made:
    """How an artifact came to be."""

    step: str
    preimage: Preimage
    measured: Measured = field(default_factory=Measured)
    shared: bool = True
    """False: never sent to a remote."""

    def to_json(self) -> Json:
        cost, image = self.measured, self.preimage
        return {
            "action": image.action,
            "code": dict(image.code),
            "inputs": {argument: _rows(tree.files) for argument, tree in image.inputs.items()},
            "measured": [cost.milliseconds, cost.cpu_milliseconds, cost.peak_bytes],
            "params": dict(image.params),
            "shared": self.shared,
            "step": self.step,
            "tools": dict(image.tools),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Made:
        """The inverse of to_json(). Raises KeyError, TypeError or AttributeError on anything else."""
        inputs = {
            argument: Tree.of(Entry(*row) for row in rows) for argument, rows in found["inputs"].items()
        }
        preimage = Preimage(found["action"], found["params"], found["code"], found["tools"], inputs)
        return cls(found["step"], preimage, Measured(*found["measured"]), found["shared"])


@dataclass(frozen=True)
class Record:
    """An artifact in a store."""

    key: str
    tree: str
    """Digest of the tree of files."""
    rows: tuple[tuple[str, str, int], ...]
    """(path, digest, size) of each file, by path."""
    rest: bytes = field(repr=False)
    """The second line, read only when somebody asks."""

    @classmethod
    def create(cls, key: str, tree: Tree, made: Made) -> Record:
        rows = tuple((entry.path, entry.digest, entry.size) for entry in tree.files)
        return cls(key, tree.digest, rows, canonical(made.to_json()))

    @classmethod
    def decode(cls, key: str, data: bytes) -> Record:
        """Raises ValueError when `data` is no whole record, or one whose paths leave their tree."""
        first, newline, rest = data.partition(b"\n")
        head = json.loads(first)
        if not newline or not rest.endswith(b"}\n") or not isinstance(head, dict) or head["format"] != FORMAT:
            raise ValueError("not a whole record of format " + FORMAT)
        rows = tuple((str(path), str(digest), int(size)) for path, digest, size in head["files"])
        for path, digest, _ in rows:
            if len(digest) != 64 or path.startswith("/") or ".." in path.split("/") or not path:
                raise ValueError(f"a record names the file {path!r}")
        return cls(key, str(head["tree"]), rows, rest[:-1])

    def encode(self) -> bytes:
        head = {"files": [list(row) for row in self.rows], "format": FORMAT, "tree": self.tree}
        return canonical(head) + b"\n" + self.rest + b"\n"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(row[2] for row in self.rows)

    @cached_property
    def files(self) -> tuple[Entry, ...]:
        return tuple(Entry(*row) for row in self.rows)

    @cached_property
    def made(self) -> Made:
        """Raises ValueError when the second line does not hold what it should."""
        try:
            return Made.from_json(json.loads(self.rest))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the record of {self.key} lacks a part: {error}") from None

    def consistent(self) -> bool:
        """Whether the key follows from the pre-image, and the tree's digest from its files."""
        return self.made.preimage.key() == self.key and tree_digest(self.files) == self.tree


def _rows(files: tuple[Entry, ...]) -> Json:
    return [cast(Json, [entry.path, entry.digest, entry.size]) for entry in files]
