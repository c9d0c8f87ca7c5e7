"""JSON that someone else wrote: a strict reader, and typed access to its objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard

from mlcbuild_format import strict_json

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

MAX_DEPTH = 64
"""Lists and objects within each other."""
MAX_INTEGER = 1 << 53
"""The largest integer of a field. Larger ones are not exact in every JSON reader."""
MAX_TEXT = 1000
"""Characters of a text field."""
_DIGITS = 100
"""Of a number. `model_max_length` of many tokenizers has 31."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FieldError(ValueError):
    """A field is missing or of the wrong kind; the message names the field and what was found."""


def parse_json(data: bytes) -> Json:
    """The value of a JSON document in UTF-8. Raises ValueError with the reason, which is one line.

    Refused besides what is no JSON: a key that stands twice in an object, numbers of more than _DIGITS digits
    or beyond a float, halves of surrogate pairs, and more than MAX_DEPTH lists and objects within each other.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark")
    try:
        document: Json = _decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_values(document, strings=_SURROGATE.search(text) is not None)
    return document


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"the number {text[:_DIGITS]}... is too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_DIGITS]} is too large")
    return value


_decode = strict_json.decoder(parse_int=_integer, parse_float=_float)


def _check_values(document: Json, strings: bool) -> None:
    """Checks the depth, level by level, and `strings` for halves of surrogate pairs."""
    level: Sequence[Json] = [document]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                inside += [*value.values(), *(value if strings else ())]
            elif isinstance(value, list):
                inside += value
            elif strings and isinstance(value, str):
                _check_surrogates(value)
        level = inside
        if not level:
            return
    raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} lists and objects within each other")


def _check_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None


class Fields:
    """One JSON object. Every accessor raises FieldError with the dotted name of the field."""

    def __init__(self, value: Json, name: str = "") -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{name or 'the document'} must be an object, found {describe(value)}")
        self.value, self.name = value, name

    def only(self, *known: str) -> Fields:
        """Refuses keys that are not in `known`."""
        unknown = sorted(set(self.value) - set(known))
        if unknown:
            raise FieldError(f"unknown field {self._path(unknown[0])}")
        return self

    def text(self, key: str, pattern: str | None = None) -> str:
        """One printable line that is not empty; the whole of it matches `pattern`."""
        value = self._get(key)
        if not is_line(value):
            raise self._wrong(key, f"a non-empty string of at most {MAX_TEXT} printable characters", value)
        if pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            raise self._wrong(key, f"a string of the form {pattern}", value)
        return value

    def integer(self, key: str, minimum: int, maximum: int = MAX_INTEGER) -> int:
        value = self._get(key)
        if not is_integer(value) or value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}", value)
        if value > maximum:
            raise self._wrong(key, f"an integer of at most {maximum}", value)
        return value

    def texts(self, key: str, pattern: str | None = None) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings", value)
        items = Fields(dict(zip(map(str, range(len(value))), value, strict=True)), self._path(key))
        return tuple(items.text(index, pattern) for index in items.value)

    def integers(self, key: str, maximum: int = MAX_INTEGER) -> tuple[int, ...]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of integers", value)
        found = [item for item in value if is_integer(item) and 0 <= item <= maximum]
        if len(found) != len(value):
            raise self._wrong(key, f"a list of integers from 0 to {maximum}", value)
        return tuple(found)

    def number(self, key: str, minimum: float, maximum: float) -> float | None:
        """None where the field is absent or null."""
        value = self.value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self._wrong(key, f"a number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def object(self, key: str) -> dict[str, Json]:
        return Fields(self._get(key), self._path(key)).value

    def fields(self, key: str) -> Fields:
        return Fields(self._get(key), self._path(key))

    def _get(self, key: str) -> Json:
        if key not in self.value:
            raise FieldError(f"{self._path(key)} is missing")
        return self.value[key]

    def _path(self, key: str) -> str:
        shown = printable(key)  # what a document says is one line here
        return f"'{self.name.strip(chr(39))}.{shown}'" if self.name else f"'{shown}'"

    def _wrong(self, key: str, wanted: str, found: Json) -> FieldError:
        return FieldError(f"{self._path(key)} must be {wanted}, found {describe(found)}")


def is_line(value: Json) -> TypeGuard[str]:
    """A text that a field may hold: not empty, not long, and nothing that moves a terminal's cursor."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def is_integer(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


LONGEST_MESSAGE = 4000
"""Characters of an error message; the rest is left out."""


def printable(text: object, longest: int = LONGEST_MESSAGE) -> str:
    """`text` as one line that is safe in a terminal, a log and a UTF-8 file.

    Line breaks, control characters (with them every escape sequence of terminals), directional overrides and
    halves of surrogate pairs are written as Python escapes. Longer texts are cut to `longest` characters.
    """
    line = str(text)
    if len(line) > longest:
        line = f"{line[: longest - 3]}..."
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def describe(value: object) -> str:
    """A short rendering of any value for an error message. It takes no longer for a large one."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > 60:
            return f"{text[:57]}..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """What `repr` returns, bit by bit; of a long text only the beginning."""
    if isinstance(value, str):
        yield repr(value[:80])
    elif isinstance(value, int) and value.bit_length() > 1024:
        yield f"an integer of {value.bit_length()} bits"
    elif isinstance(value, list):
        yield "["
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    else:
        yield repr(value)


def plain(value: object) -> Json:
    """A deep copy with plain dicts and lists for Mappings and tuples."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")
