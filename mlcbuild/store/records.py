"""Defines records, which describe the results of steps: the complete pre-image of a step's key, and the files
that the step wrote.

A record is two lines of canonical JSON. The first lists the result, the second the inputs of the step:

    {"files":[[path,digest,size],...],"format":"record/1","tree":digest}
    {"action":...,"code":{path:digest},"inputs":{argument:[[path,digest,size],...]},...,"tree":digest}

Every record passes the same checks before it is used, whether it comes from the local store, a remote cache,
an archive or a worker. `Record.decode` checks the form of every field: types, ranges, lengths, and paths that
stay in their tree. `Record.consistent` returns True if derived values are right: the key is recomputed from
the pre-image and the tree's digest from the files, and both lines must name the same tree (the second line of
an older record names none). `Record.checked` does both. Every error is a ValueError whose message completes a
sentence that begins with "the record".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, cast

from mlcbuild.canon import Entry, Json, Tree, canonical, canonical_plain, rows_digest, step_key
from mlcbuild.store.record_form import (
    Code,
    Row,
    check_params,
    check_text,
    check_texts,
    check_tree,
    is_count,
    parse,
    parse_about,
    read_rows,
)

FORMAT = "record/1"
LARGEST = 16 << 20
"""Maximum size in bytes of a step's record (the description of its result) that is read: enough for a result
of 100,000 files. Parsed, a hostile record takes up to seven times its size in memory."""
_HEAD = frozenset(("files", "format", "tree"))
_ABOUT = frozenset(("action", "code", "inputs", "measured", "params", "shared", "step", "tools"))
_WRONG_TREE = "the digest of its tree does not follow from its files"


@dataclass(frozen=True)
class Preimage:
    """Everything that is hashed into a step's key: its action, parameters, source files, tools and inputs."""

    action: str
    params: Mapping[str, Json]
    code: Mapping[str, str]
    """Path, such as mlcbuild/canon.py, of each source file that makes up the step's action: those of its own
    modules and those that they import, directly or indirectly, without libraries -> BLAKE3 digest in hex."""
    tools: Mapping[str, str]
    inputs: Mapping[str, Tree]
    """Name of an argument of the step's action -> `Tree` of the files that the action can read from the input
    passed as this argument, which may be some of the input's files. The step's key covers only the tree's
    digest."""

    def key(self) -> str:
        return self._key(canonical(self.params))

    def parsed_key(self) -> str:
        """Returns the step's key, the digest of everything that its result depends on, in hexadecimal. Its
        parameters must have been parsed from JSON without floats, which is not checked."""
        return self._key(canonical_plain(self.params))

    def _key(self, params: bytes) -> str:
        digests = {argument: tree.digest for argument, tree in self.inputs.items()}
        code = self.code if isinstance(self.code, Code) else Code(self.code)
        salted = code.salt(tuple(self.tools.items()))
        return step_key(self.action, params, salted, digests)


@dataclass(frozen=True)
class Expected:
    """The texts that the second line of a step record, its inputs as JSON, must contain for one key.

    A planner has just computed the key from these same texts, so comparing them checks the same as
    recomputing the key from the parsed line, in a fifth of the time.
    """

    before_costs: bytes
    before_shared: bytes
    before_tree: bytes

    @classmethod
    def of(
        cls, action: str, code: bytes, inputs: Mapping[str, bytes], params: bytes, tools: bytes
    ) -> Expected:
        """Returns the `Expected` with the three texts that the second line of a step record must contain, in
        this order, if the record's key is the digest of these arguments. action: "module:function" of the
        step's action; inputs: argument of the action -> canonical JSON list of its files, [path, digest,
        size] each; code (source files), params and tools: canonical JSON."""
        listed = b",".join(canonical_plain(name) + b":" + rows for name, rows in sorted(inputs.items()))
        head = b'{"action":%s,"code":%s,"inputs":{%s},"measured":' % (canonical_plain(action), code, listed)
        return cls(head, b',"params":%s,"shared":' % params, b',"tools":%s,"tree":"' % tools)

    def matches(self, rest: bytes, tree: str) -> bool:
        """Returns True if `rest`, the second line (JSON) of a step record, consists of this object's three
        texts (`before_costs`, `before_shared`, `before_tree`), with well-formed measured times and memory
        after the first, a flag (may the result be shared?) and the step's name after the second, and ends
        with `tree`, the digest of the result's files. Returns False also for valid JSON in another notation.
        """
        if not rest.startswith(self.before_costs):
            return False
        costs = _costs(rest, len(self.before_costs))
        if costs is None or not rest.startswith(self.before_shared, costs.end()):
            return False
        about = _shared_and_step(rest, costs.end() + len(self.before_shared))
        return about is not None and rest[about.end() :] == b'%s%s"}' % (self.before_tree, tree.encode())


_costs = re.compile(rb"\[(?:0|[1-9][0-9]{0,17})(?:,(?:0|[1-9][0-9]{0,17})){2}\]").match
_shared_and_step = re.compile(rb'(?:true|false),"step":"[ !#-\[\]-~]{1,4096}"').match
"""Matches, at a position of a step record's second line, `true,"step":"NAME"` or `false,"step":"NAME"`:
whether the result may be shared, and the step's name, if that is printable ASCII without quotes and
backslashes. Lines with other names are parsed as JSON instead."""


@dataclass(frozen=True)
class Measured:
    """The wall-clock time and CPU time, in milliseconds, and the peak memory, in bytes, of one run of a step.
    They are integers, because step records are canonical JSON without floats."""

    milliseconds: int = 0
    cpu_milliseconds: int = 0
    peak_bytes: int = 0
    """Peak memory of the step's process in bytes, or an upper bound of it on systems that do not measure it
    exactly.
    """


@dataclass(frozen=True)
class BuildInfo:
    """The origin of an artifact: the step that built it, everything that is hashed into the step's key, and
    the wall-clock time (ms), CPU time (ms) and peak memory (bytes) that the step took."""

    step: str
    preimage: Preimage
    measured: Measured = field(default_factory=Measured)
    shared: bool = True
    """False if the artifact is valid on this machine only and is never sent to a remote cache."""

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
    def from_json(cls, fields: object) -> BuildInfo:
        """Returns the BuildInfo that a JSON object describes: the second line of a step's record, which
        states how its result was built, as `to_json` wrote it. Raises ValueError for anything else."""
        if not isinstance(fields, dict) or fields.keys() - {"tree"} != _ABOUT:
            raise ValueError("its second line lacks a field, or has an unknown one")
        check_text("action", fields["action"])
        check_text("step", fields["step"])
        check_params(fields["params"])
        if not isinstance(fields["code"], Code):  # A Code object was checked when it was parsed.
            check_texts("code", fields["code"])
        check_texts("tools", fields["tools"])
        if not isinstance(fields["inputs"], dict):
            raise ValueError("its inputs are not a JSON object")
        inputs = {argument: _tree(read_rows(rows)) for argument, rows in fields["inputs"].items()}
        cost = fields["measured"]
        if not isinstance(cost, list) or len(cost) != 3 or not all(map(is_count, cost)):
            raise ValueError("its 'measured' is not a list of three whole numbers")
        if not isinstance(fields["shared"], bool):
            raise ValueError("its 'shared' is neither true nor false")
        preimage = Preimage(fields["action"], fields["params"], fields["code"], fields["tools"], inputs)
        return cls(fields["step"], preimage, Measured(*cost), fields["shared"])


@dataclass(frozen=True)
class Record:
    """The record of an artifact, the files that a step wrote: its key, its files, and how it was built."""

    key: str
    tree: str
    """BLAKE3 digest, in hex, of the artifact's tree: of the paths, digests and sizes of all its files."""
    rows: tuple[Row, ...]
    """(path, BLAKE3 digest, size in bytes) of each file that the step wrote, sorted by path."""
    rest: bytes = field(repr=False)
    """The second line, without its newline, of the file that describes a step's result: canonical JSON of
    everything from which the result was built, and of the time and memory that this took. It is parsed only
    on demand."""

    @classmethod
    def create(cls, key: str, tree: Tree, info: BuildInfo) -> Record:
        rows = tuple((entry.path, entry.digest, entry.size) for entry in tree.files)
        about = {**cast("dict[str, Json]", info.to_json()), "tree": tree.digest}
        return cls(key, tree.digest, rows, canonical(about))

    @classmethod
    def decode(cls, key: str, data: bytes) -> Record:
        """Parses a step's record and returns it as the one with the key `key`. The form of every field is
        checked, but not whether the record belongs to this key. Raises ValueError for a damaged record."""
        record = _head(key, data)
        BuildInfo.from_json(parse_about(record.rest))
        return record

    @classmethod
    def checked(cls, key: str, data: bytes, expected: Callable[[], Expected] | None = None) -> Record:
        """Parses a step's record, and returns it if `key` is the digest of the inputs that it lists and its
        files have the digest that it names. Raises ValueError otherwise.

        expected: function that returns the texts which a record with this key contains, for a caller that has
        just computed the key; comparing them is faster than parsing. A record with another text is parsed and
        checked."""
        record = _head(key, data)
        if expected is not None and expected().matches(record.rest, record.tree):
            if rows_digest(record.rows) != record.tree:
                raise ValueError(_WRONG_TREE)
        elif fault := record._fault(parse_about(record.rest)):
            raise ValueError(fault)
        return record

    def encode(self) -> bytes:
        head = {"files": [list(row) for row in self.rows], "format": FORMAT, "tree": self.tree}
        return canonical(head) + b"\n" + self.rest + b"\n"

    @property
    def size(self) -> int:
        """Returns the sum of the sizes of an artifact's files, in bytes."""
        return sum(row[2] for row in self.rows)

    @cached_property
    def files(self) -> tuple[Entry, ...]:
        return tuple(Entry(*row) for row in self.rows)

    @cached_property
    def info(self) -> BuildInfo:
        """Returns the step that built the artifact, the step's inputs, and the time and memory that it took,
        parsed from the step record's second line. Raises ValueError if that line is malformed."""
        return BuildInfo.from_json(parse_about(self.rest))

    def consistent(self) -> bool:
        """Returns True if the step record agrees with itself: its key is the digest of the inputs that it
        lists, and its tree digest is the digest of the files that it lists, and equals the one in its second
        line, if there is one. Raises ValueError if the second line, which lists the inputs, is malformed."""
        return not self._fault(parse_about(self.rest))

    def _fault(self, about: dict[str, Any]) -> str:
        if BuildInfo.from_json(about).preimage.parsed_key() != self.key:
            return "its key does not follow from the inputs that it lists"
        if rows_digest(self.rows) != self.tree or about.get("tree", self.tree) != self.tree:
            return _WRONG_TREE
        return ""


@lru_cache(maxsize=4096)
def _tree(rows: tuple[Row, ...]) -> Tree:
    """Returns the `Tree` of some files, (path, digest, size) each: its entries and their common digest. Trees
    are cached, because the steps of a recipe share most inputs."""
    return Tree.of(Entry(*row) for row in rows)


def _head(key: str, data: bytes) -> Record:
    """Parses the first line of a record, which lists the files of a step's result, and returns the record
    with its second line unparsed. Raises ValueError if the first line is malformed or names paths that
    `check_tree` refuses, or if the record is cut off or larger than LARGEST."""
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    first, newline, rest = data.partition(b"\n")
    if not newline or not rest.endswith(b"}\n"):
        raise ValueError("it is cut off")
    head = parse(first)
    if head.keys() != _HEAD or head["format"] != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT}")
    if not isinstance(head["tree"], str):
        raise ValueError("the digest of its tree is not one")
    record = Record(key, head["tree"], read_rows(head["files"]), rest[:-1])
    check_tree(record.rows)
    return record


def _files(files: tuple[Entry, ...]) -> Json:
    return [cast(Json, [entry.path, entry.digest, entry.size]) for entry in files]
