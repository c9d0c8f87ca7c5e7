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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeAlias, cast

from mlcbuild.canon import Entry, Json, Tree, canonical, canonical_plain, rows_digest, salt, step_key

FORMAT = "record/1"
LARGEST = 64 << 20
"""Bytes of the longest record that is read."""
_HEAD = frozenset(("files", "format", "tree"))
_ABOUT = frozenset(("action", "code", "inputs", "measured", "params", "shared", "step", "tools"))
_MOST = 1 << 62
"""Sizes and costs are below it."""
_WRONG_TREE = "the digest of its tree does not follow from its files"
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
        return self._key(canonical(self.params))

    def parsed_key(self) -> str:
        """Returns the key of a pre-image that was read from JSON without floats."""
        return self._key(canonical_plain(self.params))

    def _key(self, params: bytes) -> str:
        digests = {argument: tree.digest for argument, tree in self.inputs.items()}
        code = self.code if isinstance(self.code, Code) else Code(self.code)
        salted = code.salt(tuple(self.tools.items()))
        return step_key(self.action, params, salted, digests)


@dataclass(frozen=True)
class Expected:
    """The text of a record's second line, as far as it follows from a key whose pre-image is known.

    A planner has just computed the key from these very texts, so comparing them is the same check as
    computing the key again from the parsed line, at a fifth of the time.
    """

    before_costs: bytes
    before_shared: bytes
    before_tree: bytes

    @classmethod
    def of(
        cls, action: str, code: bytes, inputs: Mapping[str, bytes], params: bytes, tools: bytes
    ) -> Expected:
        """The text for a pre-image whose parts are canonical JSON; inputs: argument -> rows of its files."""
        listed = b",".join(canonical_plain(name) + b":" + rows for name, rows in sorted(inputs.items()))
        head = b'{"action":%s,"code":%s,"inputs":{%s},"measured":' % (canonical_plain(action), code, listed)
        return cls(head, b',"params":%s,"shared":' % params, b',"tools":%s,"tree":"' % tools)

    def matches(self, rest: bytes, tree: str) -> bool:
        """Whether a second line has this text, and the right form where it may differ.

        False also for a line that is right and was written by another program: it must be parsed.
        """
        if not rest.startswith(self.before_costs):
            return False
        costs = _costs(rest, len(self.before_costs))
        if costs is None or not rest.startswith(self.before_shared, costs.end()):
            return False
        about = _shared_and_step(rest, costs.end() + len(self.before_shared))
        return about is not None and rest[about.end() :] == b'%s%s"}' % (self.before_tree, tree.encode())


_costs = re.compile(rb"\[(?:(?:0|[1-9][0-9]{0,17})(?:,|(?=\]))){3}\]").match
_shared_and_step = re.compile(rb'(?:true|false),"step":"[ !#-\[\]-~]{1,4096}"').match
"""The step's name in printable ASCII without quotes and backslashes: other names are parsed."""


class Code(dict[str, str]):
    """Source files of an action -> digest. All records of an action in one process share one object.

    It remembers the salts of keys: a recipe has a few actions and thousands of steps. It is never changed.
    """

    def __init__(self, code: Mapping[str, str]) -> None:
        super().__init__(code)
        self._salts: dict[tuple[tuple[str, str], ...], str] = {}

    def salt(self, tools: tuple[tuple[str, str], ...]) -> str:
        """Returns the salt of a step with this code and these tools, (name, version) each."""
        if tools not in self._salts:
            self._salts[tools] = salt(self, dict(tools))
        return self._salts[tools]

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)  # for another process it is a plain mapping


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
        if not isinstance(found["code"], Code):  # those were checked when they were read first
            _check_texts("code", found["code"])
        _check_texts("tools", found["tools"])
        if not isinstance(found["inputs"], dict):
            raise ValueError("its inputs are not a JSON object")
        inputs = {argument: _tree(_rows(rows)) for argument, rows in found["inputs"].items()}
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
        record = _head(key, data)
        Made.from_json(_parse_about(record.rest))
        return record

    @classmethod
    def checked(cls, key: str, data: bytes, expected: Callable[[], Expected] | None = None) -> Record:
        """The record of `key`, and of nothing else, as it was written. Raises ValueError.

        expected: computes the text that follows from the pre-image of `key`, where the caller has it.
        """
        record = _head(key, data)
        if expected is not None and expected().matches(record.rest, record.tree):
            if rows_digest(record.rows) != record.tree:
                raise ValueError(_WRONG_TREE)
        elif fault := record._fault(_parse_about(record.rest)):
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
        return Made.from_json(_parse_about(self.rest))

    def consistent(self) -> bool:
        """Whether the key follows from the pre-image, and the tree's digest from its files."""
        return not self._fault(_parse_about(self.rest))

    def _fault(self, about: dict[str, Any]) -> str:
        if Made.from_json(about).preimage.parsed_key() != self.key:
            return "its key does not follow from what it says it was made of"
        if rows_digest(self.rows) != self.tree or about.get("tree", self.tree) != self.tree:
            return _WRONG_TREE
        return ""


@lru_cache(maxsize=4096)
def _tree(rows: tuple[Row, ...]) -> Tree:
    """The tree of an input. The steps of a recipe share most of theirs."""
    return Tree.of(Entry(*row) for row in rows)


@lru_cache(maxsize=4096)
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


def _head(key: str, data: bytes) -> Record:
    """The record with its first line checked and its second not parsed. Raises ValueError."""
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
    record = Record(key, head["tree"], _rows(head["files"]), rest[:-1])
    _check_tree(record.rows)
    return record


_codes: dict[bytes, Code] = {}
"""JSON text of source files -> what it says."""
_MOST_CODES = 512
_BEFORE_ACTION, _BEFORE_CODE, _AFTER_CODE = b'{"action":"', b'","code":{', b'},"inputs":'


def _parse_about(rest: bytes) -> dict[str, Any]:
    """Returns the second line of a record, as `_parse` does.

    Most of it are the source files of the action, which thousands of records share. Their text is parsed
    and checked once; where the same bytes stand again, only the rest of the line is parsed.
    """
    action_end = rest.find(b'"', len(_BEFORE_ACTION))
    end = rest.find(_AFTER_CODE, action_end) + 1
    start = action_end + len(_BEFORE_CODE) - 1
    if (
        end == 0
        or not rest.startswith(_BEFORE_ACTION)
        or not rest.startswith(_BEFORE_CODE, action_end)
        or b"\\" in rest[:action_end]
    ):
        return _parse(rest)  # not written by us, and perhaps right all the same
    text = rest[start:end]
    code = _codes.get(text)
    if code is None:
        about = _parse(rest)
        with suppress(ValueError):  # of a line with a brace in a name this may be a part, and is not noted
            _note_code(text)
        return about
    about = _parse(rest[: action_end + 2] + rest[end + 1 :])
    if "code" in about:
        raise _FormError("it says something twice")
    about["code"] = code
    return about


def _note_code(text: bytes) -> None:
    code = _parse(text)
    _check_texts("code", code)
    if len(_codes) >= _MOST_CODES:
        _codes.clear()
    _codes[text] = Code(code)


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


def _rows(listed: object) -> tuple[Row, ...]:
    """Returns the files of a tree or an input, each field checked. Raises ValueError.

    Written out, because a short run checks thousands of rows.
    """
    if not isinstance(listed, list):
        raise ValueError("its files are not a list")
    for row in listed:
        if type(row) is not list or len(row) != 3 or type(row[0]) is not str or not row[0]:
            raise ValueError("a file in it is not a path, a digest and a size")
        path, digest, size = row
        # A bool is no size.
        if (
            type(digest) is not str
            or not _is_digest(digest)
            or type(size) is not int
            or not 0 <= size < _MOST
        ):
            raise ValueError(f"the digest or the size of {path[:100]!r} in it is not one")
    return tuple(map(tuple, listed))


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
