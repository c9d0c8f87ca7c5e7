"""Defines the syntax of step records: strict JSON, and a check for each kind of field.

Functions that parse or check raise ValueError with a message that completes a sentence beginning with "the
record".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

from mlcbuild_format import strict_json
from mlcbuild_format.strict_json import JsonError

from mlcbuild.canon import canonical, salt

_MOST = 1 << 62
"""Upper bound, itself excluded, of the integers that a step's record may state: sizes of files and peak
memory in bytes, times in milliseconds."""
_LONGEST_NAME, _LONGEST_PATH, _DEEPEST = 255, 4096, 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Matches control characters, line separators and bidirectional marks, which must not occur in names of files
and steps because these are printed on terminals.
"""
_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch
Row: TypeAlias = tuple[str, str, int]
"""The description of one file of an artifact: (path inside the artifact, BLAKE3 digest in hex, size in
bytes)."""


class Code(dict[str, str]):
    """The source files that a step's action consists of: path -> digest. It must not be changed. All records
    of an action share one object, which caches the digest of these files and of tool versions, since a recipe
    has few actions and thousands of steps."""

    def __init__(self, code: Mapping[str, str]) -> None:
        super().__init__(code)
        self._salts: dict[tuple[tuple[str, str], ...], str] = {}

    def salt(self, tools: tuple[tuple[str, str], ...]) -> str:
        """Returns the salt of a step, a part of its cache key: the BLAKE3 digest, in hex, of its action's
        source files and of `tools`, pairs (name of a tool, version). It is computed once for equal `tools`.
        """
        if tools not in self._salts:
            self._salts[tools] = salt(self, dict(tools))
        return self._salts[tools]

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)  # Pickling gives another process a plain dict.


@lru_cache(maxsize=4096)
def path_fault(path: str) -> str:
    """Returns the reason why a step's result must not contain a file at this path, which is relative to the
    result, as words that follow the path in an error message, such as "is not UTF-8"; "" if it may."""
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


_codes: dict[bytes, Code] = {}
"""A cache: JSON text of the object path -> digest that lists the source files in a step record -> the same
object, parsed, as a `Code`. It is emptied when it holds 512."""
_MOST_CODES = 512
_BEFORE_ACTION, _BEFORE_CODE, _AFTER_CODE = b'{"action":"', b'","code":{', b'},"inputs":'


def parse_about(rest: bytes) -> dict[str, Any]:
    """Parses the second line of a step record, the strict JSON object of the inputs from which the step's
    result was built and of its costs, and returns this object; its fields are not checked. Its "code" may be
    a `Code`, which other records share and nobody may change. Raises ValueError for text that is no strict
    JSON object.

    Most of the line lists the source files of the action, which thousands of records share. Their text is
    parsed once; for the same bytes in another record, only the rest of the line is parsed."""
    action_end = rest.find(b'"', len(_BEFORE_ACTION))
    end = rest.find(_AFTER_CODE, action_end) + 1
    start = action_end + len(_BEFORE_CODE) - 1
    if (
        end == 0
        or not rest.startswith(_BEFORE_ACTION)
        or not rest.startswith(_BEFORE_CODE, action_end)
        or b"\\" in rest[:action_end]
    ):
        return parse(rest)  # Another program wrote it, and it may be correct.
    text = rest[start:end]
    code = _codes.get(text)
    if code is None:
        about = parse(rest)
        with suppress(ValueError):  # A name with a brace cuts the text short; it is then not cached.
            _note_code(text)
        return about
    about = parse(rest[: action_end + 2] + rest[end + 1 :])
    if "code" in about:
        raise JsonError("it repeats a key")
    about["code"] = code
    return about


def _note_code(text: bytes) -> None:
    code = parse(text)
    check_texts("code", code)
    if len(_codes) >= _MOST_CODES:
        _codes.clear()
    _codes[text] = Code(code)


def _no_float(text: str) -> NoReturn:
    raise JsonError(f"it holds the number {text[:20]}, which is not whole")


def parse(line: bytes) -> dict[str, Any]:
    """Parses bytes as a strict JSON object. Raises ValueError for anything else, also for floats, duplicate
    keys, lone surrogates and text that is not UTF-8.
    """
    try:
        value = _decode(line.decode())
        if b"\\u" in line:
            canonical(value)  # raises for a lone surrogate
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except JsonError:
        raise
    # The exception comes from the parser, from UTF-8, or from a number with thousands of digits.
    except ValueError:
        raise ValueError("it is not JSON, or not UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError("it is not two JSON objects")
    return value


_decode = strict_json.decoder(parse_float=_no_float)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST  # a bool is not a number here


def read_rows(listed: object) -> tuple[Row, ...]:
    """Checks a JSON list of files, and returns (path, digest, size in bytes) of each. Raises ValueError if a
    digest or a size is malformed or a path is not a text or empty; `check_tree` checks the paths further.

    The checks are inlined, because a short run checks thousands of files.
    """
    if not isinstance(listed, list):
        raise ValueError("its files are not a list")
    for row in listed:
        if type(row) is not list or len(row) != 3 or type(row[0]) is not str or not row[0]:
            raise ValueError("a file in it is not a path, a digest and a size")
        path, digest, size = row
        # A bool is not a size.
        if (
            type(digest) is not str
            or not _is_digest(digest)
            or type(size) is not int
            or not 0 <= size < _MOST
        ):
            raise ValueError(f"the digest or the size of {path[:100]!r} in it is malformed")
    return tuple(map(tuple, listed))


def check_tree(rows: Iterable[Row]) -> None:
    """Raises ValueError unless these files (path, digest, size) can form a tree on every file system: every
    path is relative, has no "..", backslash or control character and no name that is too long, stands only
    once, is not the directory of another file, and does not differ from another only in case.
    """
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
    if same := same_but_for_case(files | directories):
        first, second = (repr(name[:100]) for name in same)
        raise ValueError(f"it names {first} and {second}, which are one file where case does not count")


def same_but_for_case(names: Collection[str]) -> tuple[str, ...]:
    """Returns the first two of the names, in alphabetical order, that differ only in case; () if there are
    none. Such names are one file on the usual file systems of macOS."""
    if len(set(map(str.lower, names))) == len(names):
        return ()
    spellings: dict[str, str] = {}
    for name in sorted(names):
        if (first := spellings.setdefault(name.lower(), name)) != name:
            return first, name
    return ()


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_PATH or _CONTROL.search(value):
        raise ValueError(f"its {name} is not a line of text")


def check_texts(name: str, value: object) -> None:
    if not isinstance(value, dict) or not {str}.issuperset(map(type, value.values())):
        raise ValueError(f"its {name} does not map names to text")


def check_params(value: object) -> None:
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
