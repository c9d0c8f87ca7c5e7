"""Reads YAML files strictly, and records the position of every key and value.

The rules, which recipes/README.md states for users:

- UTF-8, one document, at most MAX_BYTES bytes (4 MiB) and MAX_DEPTH levels (32). Keys are text and unique.
- No control characters, nor others that are invisible or that only YAML 1.1 reads as line breaks. Characters
  that look like a space may not begin or end an unquoted text.
- No anchors, aliases, merge keys or tags, so that each value has one position and a small file stays small.
- Plain scalars: `true`, `false`, `null` and decimal numbers mean the same as in JSON; `~` and nothing mean
  null. Whatever YAML 1.1 and 1.2 read differently (no, on, 012, 1_000, 1:30, 2024-01-01, .inf) is text.
"""

from __future__ import annotations

import errno
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml
from mlcbuild_format import regular

from mlcbuild.errors import InputError, Problem, Problems

MAX_BYTES = 4 << 20
"""Maximum size of a YAML file in bytes (4 MiB); a larger one is refused. A recipe of 60,000 models with
different sources has three million."""
MAX_DEPTH = 32
_TOO_DEEP = f"this is nested more than {MAX_DEPTH} levels deep"
MAX_DIGITS = 18
"""Maximum number of digits of an integer in a YAML file (18), so that each fits into 64 bits; a longer one is
read as text."""

Scalar: TypeAlias = bool | int | float | str | None
Data: TypeAlias = Scalar | list["Data"] | dict[str, "Data"]
Where: TypeAlias = tuple[str | int, ...]
"""The path of a value: the keys and indices that lead to it from the top of a document."""

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Matches a character that a YAML file may not contain: a control character other than tab, LF and CR, a
surrogate, U+FFFE, U+FFFF, or a byte order mark (one at the beginning of a file is removed before). U+0085,
U+2028 and U+2029 are among them, because YAML 1.1 reads them as line breaks and YAML 1.2 does not."""
_ODD_SPACE = "[\xa0\u1680\u180e\u2000-\u200b\u202f\u205f\u2060\u3000]"
_MISTAKEN = re.compile(rf"(?:^ *|:)(?P<a>{_ODD_SPACE})|(?P<b>{_ODD_SPACE}) *(?:#|$)", re.MULTILINE)
"""Matches, as group `a` or `b`, a character that is mistaken for a space where YAML requires one: at a line's
beginning, after ':', or before a comment or a line's end."""


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file. `line` and `column` count from 1, columns in characters."""

    file: str
    line: int
    column: int

    def problem(self, message: str) -> Problem:
        return Problem(self.file, self.line, self.column, message)


@dataclass(frozen=True)
class Document:
    """A YAML file as plain data, with the position of each key and value in the file."""

    file: str
    data: Data
    values: Mapping[Where, tuple[int, int]]
    """Path of a value in a YAML document, the keys and list indices that lead to it -> (line, column) of the
    value, counted from 1.
    """
    keys: Mapping[Where, tuple[int, int]]
    """Path of a value in a YAML mapping, the keys and list indices that lead to it from the top of the
    document -> (line, column), counted from 1, of the key to which the value belongs."""
    texts: Mapping[Where, str]
    """Path of a number or boolean in a YAML document, the keys and list indices that lead to it -> its text
    as it is written in the file.
    """
    problems: tuple[Problem, ...] = ()
    """Problems of a YAML file that can be read, such as a duplicate key (its first value is kept)."""

    def place(self, where: Where) -> Place:
        """Returns the Place (file, line, column) of the value at the path `where`, keys and list indices in
        the YAML document; if the file has no such value, that of the nearest enclosing value.
        """
        while where and where not in self.values:
            where = where[:-1]
        return Place(self.file, *self.values.get(where, (1, 1)))

    def key_place(self, where: Where) -> Place:
        """Returns the Place (file, line, column) of the key of a value in a YAML document, or of the value
        itself if it has no key; if the file has no such value, that of the nearest enclosing value. where:
        path of the value, keys and list indices."""
        return Place(self.file, *self.keys[where]) if where in self.keys else self.place(where)

    def get(self, where: Where) -> Data:
        """Returns the value at a path of keys and indices in a YAML document; None if there is none. Raises
        IndexError for an index beyond the end of a list."""
        value = self.data
        for part in where:
            if isinstance(value, dict) and isinstance(part, str):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int):
                value = value[part]
            else:
                return None
        return value


def read(path: Path) -> Document:
    """Reads a YAML file, and returns its data with their positions. Raises InputError with all problems up to
    the point where reading ends if it cannot be read, is larger than 4 MiB, empty, malformed or nested too
    deeply, or holds an alias, a merge key, or a list or mapping as a key; other problems, such as a duplicate
    key, are in the result."""
    try:
        data = regular.read(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise InputError([_too_large(str(path))]) from None
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError([Problem(str(path), 0, 0, f"cannot read this file: {reason}")]) from None
    return parse(data, str(path))


def parse(data: bytes, file: str) -> Document:
    """Parses the bytes of a YAML file and returns its data with their positions. file: its name, for
    messages. Raises InputError with all problems up to the point where reading ends if they are more than 4
    MiB, empty, malformed or nested too deeply, or hold an alias, a merge key, or a list or mapping as a key;
    other problems, such as a duplicate key, are in the result."""
    if len(data) > MAX_BYTES:
        raise InputError([_too_large(file)])
    builder = _Builder(file)
    text = _decode(data, file)
    try:
        for event in _events(text):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        builder.problems.append(_syntax(error, text, file))
        builder.lost = True
    except yaml.YAMLError as error:
        builder.problems.append(Problem(file, 0, 0, f"this is not YAML: {error}"))
        builder.lost = True
    if not builder.lost and builder.root is None:
        builder.problems.append(Problem(file, 1, 1, "the file is empty"))
        builder.lost = True
    if builder.lost:
        raise InputError(builder.problems)
    return Document(file, builder.root, builder.values, builder.keys, builder.texts, tuple(builder.problems))


def _too_large(file: str) -> Problem:
    message = f"the file is larger than {MAX_BYTES} bytes, the limit for a file written by hand"
    return Problem(file, 0, 0, message)


def scalar(text: str) -> Scalar:
    """Returns the value of an unquoted YAML scalar: true, false, null (also True, TRUE and so on), None for
    "" and "~", or a decimal number; anything else is text, such as yes, 012 and 1_000. An integer of more
    than 18 digits, or a number that is infinite as a float, is text too."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text.lstrip("+-")) <= MAX_DIGITS else text
    if _FLOAT.fullmatch(text):
        value = float(text)
        return value if abs(value) != float("inf") else text
    return text


def _decode(data: bytes, file: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError([Problem(file, 1, 1, "the file is UTF-16: save it as UTF-8")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # With a byte order mark, `start` is relative to its end.
        before = error.object[: error.start]
        line, last = before.count(b"\n") + 1, before.rpartition(b"\n")[2]
        message = f"the file is not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
        raise InputError([Problem(file, line, len(last.decode()) + 1, message)]) from None
    match = _CONTROL.search(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        column = match.start() - text.rfind("\n", 0, match.start())
        character = _named(match.group())
        raise InputError(
            [Problem(file, line, column, f"{character} may not appear in a YAML file: remove it")]
        )
    return text


def _named(character: str) -> str:
    """Returns a description of an invisible character: its code point and, unless it is a control character
    or a surrogate, its Unicode name."""
    number = f"U+{ord(character):04X}"
    if unicodedata.category(character) in ("Cc", "Cs", "Cn"):
        return f"the control character {number}"
    if character == "\ufeff":
        return f"the byte order mark {number}"
    return f"the character {number} ({unicodedata.name(character, '')})"


def _events(text: str) -> Iterator[yaml.Event]:
    """Yields the events of PyYAML's parser, which, unlike PyYAML's composer, does not recurse: a deep
    document cannot overflow the stack. A syntax error is raised by the iterator, as yaml.YAMLError, after the
    events before it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    yield from yaml.parse(text, Loader=loader)


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.splitlines()
    written = lines[line] if line < len(lines) else ""
    problem = error.problem or ""
    begin = error.context_mark.line if error.context_mark else line
    for number in range(min(begin, line), min(line + 1, len(lines))):
        if odd := _odd_space(lines[number]):
            at, message = odd
            return Problem(file, number + 1, at + 1, message)
    if "\t" in written[: column + 1] and not written[:column].strip():
        message = "a tab may not indent a line: use spaces"
    elif "cannot start any token" in problem:
        message = f"a value may not start with '{written[column : column + 1]}': put it in quotes"
    elif "nesting depth" in problem:  # libyaml also has a limit, which is larger.
        message = _TOO_DEEP
    elif problem.startswith("mapping values are not allowed"):
        message = "': ' may not stand here: start a new line, or put the text in quotes"
    else:
        message = f"this is not YAML: {', '.join(filter(None, (error.context, problem)))}"
        if (error.context or "").startswith("while parsing") and _cuts_text(written, column):
            message += '; a text with a brace or bracket must be in quotes: "dist/{model}", "${name}"'
    return Problem(file, line + 1, column + 1, message)


def _odd_space(text: str) -> tuple[int, str] | None:
    """Returns (offset in characters from the beginning of `text`, error message) for the first character that
    is mistaken for a space where YAML requires one; None if there is none."""
    match = _MISTAKEN.search(text)
    if match is None:
        return None
    at = max(match.span("a")[0], match.span("b")[0])
    return at, f"{_named(text[at])} is not a space in YAML: type a plain space, or put the text in quotes"


def _cuts_text(written: str, column: int) -> bool:
    """Returns True if a YAML syntax error is probably due to a brace or bracket in an unquoted text, which
    ends such a text early. `written` is the line of the error and `column` its offset there, from 0; the
    brace or bracket must stand at this offset, or be the last character before it that is not a space."""
    brackets = ("{", "[", "}", "]")
    return written[column : column + 1] in brackets or written[:column].rstrip()[-1:] in brackets


@dataclass
class _Frame:
    """A YAML mapping or list while it is being read."""

    container: dict[str, Data] | list[Data]
    where: Where
    key: str | None = None
    """The key, in the YAML mapping that is being read, of the value that follows; None in a list, or before a
    key.
    """
    drop: bool = False
    """True if the YAML value that is read next is discarded, because its key occurs twice in the mapping."""
    is_key: bool = False
    """True for a YAML mapping or list that stands where its enclosing mapping needs a key, which is an error:
    its contents are parsed and discarded.
    """


@dataclass
class _Builder:
    """Builds dictionaries, lists and scalars from the events of a YAML parser, without recursion."""

    file: str
    root: Data = None
    documents: int = 0
    values: dict[Where, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Where, tuple[int, int]] = field(default_factory=dict)
    texts: dict[Where, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    lost: bool = False
    """True if part of the YAML file's data is missing: parsing then raises InputError, since further checks
    would report problems that do not exist."""
    stack: list[_Frame] = field(default_factory=list)

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents == 2:
                self._problem(event, "a second document starts here: a file holds one")
        elif self.documents > 1:
            return
        elif isinstance(event, yaml.AliasEvent):
            self._problem(event, f"the alias *{event.anchor} is not allowed: write the value out", lost=True)
            self._scalar("", event, is_unquoted=True)
        elif isinstance(event, yaml.NodeEvent):
            self._node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            frame = self.stack.pop()
            if frame.is_key and self.stack:
                self.stack[-1].key = f"?{len(self.problems)}"

    def _node(self, event: yaml.NodeEvent) -> None:
        if event.anchor is not None:
            self._problem(event, f"the anchor &{event.anchor} is not allowed: there are no aliases")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._problem(event, f"the tag {tag} is not allowed: quote a value to make it text")
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event.value, event, is_unquoted=not event.style)
            return
        if len(self.stack) >= MAX_DEPTH:
            self._problem(event, _TOO_DEEP)
            raise InputError(self.problems)
        is_key = self._expects_key()
        if is_key:
            self._problem(event, "a list or a mapping cannot be a key", lost=True)
            self.stack[-1].key = "?"
        container: dict[str, Data] | list[Data] = {} if isinstance(event, yaml.MappingStartEvent) else []
        where = self._put(container, event)
        self.stack.append(_Frame(container, where, is_key=is_key))

    def _scalar(self, text: str, event: yaml.Event, is_unquoted: bool) -> None:
        control = _CONTROL.search(text)
        if control:
            self._problem(event, f"{_named(control.group())} may not appear in text")
            text = _CONTROL.sub("?", text)
        if is_unquoted and (odd := _odd_space(text)):
            line, column = _position(event)
            self.problems.append(Problem(self.file, line, column + odd[0] * ("\n" not in text), odd[1]))
        if self._expects_key():
            self._key(text, event, is_unquoted)
            return
        value = scalar(text) if is_unquoted else text
        where = self._put(value, event)
        if value is not None and not isinstance(value, str):
            self.texts[where] = text

    def _key(self, text: str, event: yaml.Event, is_unquoted: bool) -> None:
        frame = self.stack[-1]
        assert isinstance(frame.container, dict)
        where = (*frame.where, text)
        if text == "<<" and is_unquoted:
            self._problem(event, "the merge key << is not allowed: write the keys out", lost=True)
        elif where in self.keys:
            self._problem(event, f"the key '{text}' appears twice; first on line {self.keys[where][0]}")
            frame.key, frame.drop = f"{text}?{len(self.problems)}", True
            return
        self.keys[where] = _position(event)
        frame.key = text

    def _put(self, value: Data, event: yaml.Event) -> Where:
        """Stores a value that the YAML parser has read in the mapping or list that is being built, or as the
        document's root, and returns the value's path, keys and list indices. The value of a repeated key is
        dropped; its path has a made-up key such as "name?1". event: the parser's event, for line and column.
        """
        if not self.stack:
            self.root = value
            where: Where = ()
        else:
            frame = self.stack[-1]
            if isinstance(frame.container, list):
                where = (*frame.where, len(frame.container))
                frame.container.append(value)
            else:
                assert frame.key is not None
                where = (*frame.where, frame.key)
                if not frame.drop:
                    frame.container[frame.key] = value
                frame.key, frame.drop = None, False
        self.values[where] = _position(event)
        return where

    def _expects_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].container, dict) and self.stack[-1].key is None

    def _problem(self, event: yaml.Event, message: str, lost: bool = False) -> None:
        line, column = _position(event)
        self.problems.append(Problem(self.file, line, column, message))
        self.lost = self.lost or lost


def _position(event: yaml.Event) -> tuple[int, int]:
    mark = event.start_mark
    assert mark is not None
    return mark.line + 1, mark.column + 1
