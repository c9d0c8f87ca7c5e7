"""What a store remembers of a step: the whole pre-image of its key, and the files it made.

A record is two lines of canonical JSON. The first says what was made, the second from what and how:

    {"files":[[path,digest,size],...],"format":"record/1","tree":digest}
    {"action":...,"code":{path:digest},"inputs":{argument:[[path,digest,size],...]},...,"tree":digest}

Wherever a record comes from (the local store, a remote, an archive, a worker), it passes the same checks
before anything uses it. `Record.decode` checks the form of every field: types, ranges, lengths, paths that
stay in their tree. `Record.consistent` checks what follows from what: the key is computed anew from the
pre-image, the tree's digest from the files, and both lines must name the same tree (the second line of an
older record names none). `Record.checked` does both. Every error is a ValueError whose message ends a
sentence that begins with "the record".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeAlias, cast

from mlcbuild.canon import Entry, Json, Tree, canonical, salt, step_key, tree_digest

FORMAT = "record/1"
LARGEST = 64 << 20
"""Bytes of the longest record that is read."""
_HEAD = frozenset(("files", "format", "tree"))
_ABOUT = frozenset(("action", "code", "inputs", "measured", "params", "shared", "step", "tools"))
_MOST = 1 << 62
"""Sizes and costs are below it."""
_LONGEST_NAME, _LONGEST_PATH, _DEEPEST = 255, 4096, 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]")
"""C0 and C1, line separators, and what changes the direction of text: names and steps reach terminals."""
_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch
Row: TypeAlias = tuple[str, str, int]
"""Path, digest and size of a file."""


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
        salted = _salt(tuple(self.code.items()), tuple(self.tools.items()))
        return step_key(self.action, canonical(self.params), salted, digests)


@lru_cache(maxsize=512)
def _salt(code: tuple[tuple[str, str], ...], tools: tuple[tuple[str, str], ...]) -> str:
    """As `canon.salt`: a recipe has a few actions and thousands of steps."""
    return salt(dict(code), dict(tools))


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
            "inputs": {argument: _files(tree.files) for argument, tree in image.inputs.items()},
            "measured": [cost.milliseconds, cost.cpu_milliseconds, cost.peak_bytes],
            "params": dict(image.params),
            "shared": self.shared,
            "step": self.step,
            "tools": dict(image.tools),
        }

    @classmethod
    def from_json(cls, found: object) -> Made:
        """The inverse of to_json(). Raises ValueError on anything else."""
        if not isinstance(found, dict) or found.keys() - {"tree"} != _ABOUT:
            raise ValueError("its second line lacks a part, or has one too many")
        _check_text("action", found["action"])
        _check_text("step", found["step"])
        _check_params(found["params"])
        for name in ("code", "tools"):
            _check_texts(name, found[name])
        if not isinstance(found["inputs"], dict):
            raise ValueError("its inputs are not a JSON object")
        inputs = {
            argument: Tree.of(Entry(*row) for row in _rows(rows))
            for argument, rows in found["inputs"].items()
        }
        cost = found["measured"]
        if not isinstance(cost, list) or len(cost) != 3 or not all(map(_is_count, cost)):
            raise ValueError("what it says was measured is not three whole numbers")
        if not isinstance(found["shared"], bool):
            raise ValueError("its 'shared' is neither true nor false")
        preimage = Preimage(found["action"], found["params"], found["code"], found["tools"], inputs)
        return cls(found["step"], preimage, Measured(*cost), found["shared"])


@dataclass(frozen=True)
class Record:
    """An artifact in a store."""

    key: str
    tree: str
    """Digest of the tree of files."""
    rows: tuple[Row, ...]
    """(path, digest, size) of each file, by path."""
    rest: bytes = field(repr=False)
    """The second line, read only when somebody asks."""

    @classmethod
    def create(cls, key: str, tree: Tree, made: Made) -> Record:
        rows = tuple((entry.path, entry.digest, entry.size) for entry in tree.files)
        about = {**cast("dict[str, Json]", made.to_json()), "tree": tree.digest}
        return cls(key, tree.digest, rows, canonical(about))

    @classmethod
    def decode(cls, key: str, data: bytes) -> Record:
        """A record whose every field has the right form. Raises ValueError."""
        record, about = _decode(key, data)
        Made.from_json(about)
        return record

    @classmethod
    def checked(cls, key: str, data: bytes) -> Record:
        """The record of `key`, and of nothing else, as it was written. Raises ValueError."""
        record, about = _decode(key, data)
        if fault := record._fault(about):
            raise ValueError(fault)
        return record

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
        return Made.from_json(_parse(self.rest))

    def consistent(self) -> bool:
        """Whether the key follows from the pre-image, and the tree's digest from its files."""
        return not self._fault(_parse(self.rest))

    def _fault(self, about: dict[str, Any]) -> str:
        if Made.from_json(about).preimage.key() != self.key:
            return "its key does not follow from what it says it was made of"
        if tree_digest(self.files) != self.tree or about.get("tree", self.tree) != self.tree:
            return "the digest of its tree does not follow from its files"
        return ""


def path_fault(path: str) -> str:
    """Why no record may name a file `path` in a tree, the end of a sentence; "" when it may."""
    try:
        lengths = [len(part.encode()) for part in path.split("/")]
    except UnicodeEncodeError:
        return "is not UTF-8"
    if _CONTROL.search(path) or "\\" in path:
        return "holds a backslash or a control character"
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        return "is not a plain path inside its tree"
    if max(lengths) > _LONGEST_NAME or sum(lengths) + len(lengths) > _LONGEST_PATH:
        return "is longer than file systems allow"
    return ""


def _decode(key: str, data: bytes) -> tuple[Record, dict[str, Any]]:
    """The record, and what its second line says, not checked. Raises ValueError."""
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    first, newline, rest = data.partition(b"\n")
    if not newline or not rest.endswith(b"}\n"):
        raise ValueError("it is cut off")
    head = _parse(first)
    if head.keys() != _HEAD or head["format"] != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT}")
    if not isinstance(head["tree"], str):
        raise ValueError("the digest of its tree is not one")
    record = Record(key, head["tree"], tuple(_rows(head["files"])), rest[:-1])
    _check_tree(record.rows)
    return record, _parse(record.rest)


class _FormError(ValueError):
    """What JSON allows and a record does not. The message ends a sentence."""


def _parse(line: bytes) -> dict[str, Any]:
    """A JSON object without floats, duplicate keys and text that is not UTF-8. Raises ValueError."""
    try:
        found = _read(line.decode())
        if b"\\u" in line:
            canonical(found)  # a lone surrogate
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except _FormError:
        raise
    except ValueError:  # of the parser, UTF-8, or a number of thousands of digits
        raise ValueError("it is not JSON, or not UTF-8") from None
    if not isinstance(found, dict):
        raise ValueError("it is not two JSON objects")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _FormError("it says something twice")
    return found


def _no_float(text: str) -> NoReturn:
    raise _FormError(f"it holds the number {text[:20]}, which is not whole")


_read = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float).decode


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST  # a bool is no number here


def _rows(found: object) -> Iterable[Row]:
    if not isinstance(found, list):
        raise ValueError("its files are not a list")
    for row in found:
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str) or not row[0]:
            raise ValueError("a file in it is not a path, a digest and a size")
        path, digest, size = row
        if not isinstance(digest, str) or not _is_digest(digest) or not _is_count(size):
            raise ValueError(f"the digest or the size of {path[:100]!r} in it is not one")
        yield path, digest, size


def _check_tree(rows: Iterable[Row]) -> None:
    """Raises ValueError unless the rows are a tree of files that any system can hold."""
    files: set[str] = set()
    directories: set[str] = set()
    for path, _, _ in rows:
        if fault := path_fault(path):
            raise ValueError(f"it names the file {path[:100]!r}, which {fault}")
        if path in files:
            raise ValueError(f"it names the file {path[:100]!r} twice")
        files.add(path)
        while (path := path.rpartition("/")[0]) and path not in directories:
            directories.add(path)
    if clash := files & directories:
        raise ValueError(f"it names {min(clash)!r} as a file and as a directory")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_PATH or _CONTROL.search(value):
        raise ValueError(f"its {name} is not a line of text")


def _check_texts(name: str, value: object) -> None:
    if not isinstance(value, dict) or not {str}.issuperset(map(type, value.values())):
        raise ValueError(f"its {name} does not map names to text")


def _check_params(value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError("its params are not a JSON object")
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for part in level
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return
    raise ValueError("its params are nested too deeply")


def _files(files: tuple[Entry, ...]) -> Json:
    return [cast(Json, [entry.path, entry.digest, entry.size]) for entry in files]
