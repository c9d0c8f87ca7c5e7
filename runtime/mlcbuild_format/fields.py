"""A strict reader of untrusted JSON, and typed access to the fields of its objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard

from mlcbuild_format import strict_json

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

MAX_DEPTH = 64
"""Maximum depth of nested lists and objects in a JSON document."""
MAX_INTEGER = 1 << 53
"""The largest integer that is accepted in a field of a bundle's JSON files, 2**53: larger ones are not exact
in every JSON reader."""
MAX_TEXT = 1000
"""Maximum number of characters of a string in a bundle's JSON files that the runtime prints or compares. A
longer one raises FieldError."""
_DIGITS = 100
"""Maximum digits of an integer in a JSON document: `model_max_length` of many tokenizers has 31."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FieldError(ValueError):
    """The error for a JSON object that has a missing, unknown or wrong field, or fields that contradict each
    other. The message names the field."""


def parse_json(data: bytes) -> Json:
    """Returns the value of a JSON document in UTF-8. Raises ValueError with a reason of one line.

    Besides invalid JSON it refuses a byte order mark, NaN, duplicate keys in an object, integers of more than
    100 digits, numbers outside the range of a float, unpaired surrogates, and more than 64 nested lists and
    objects.
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
    """Raises ValueError if lists and objects in a JSON value are nested more than 64 deep, or, where
    `strings` is True, if a string (a value or a key) holds an unpaired surrogate."""
    level: Sequence[Json] = [document]
    for depth in range(MAX_DEPTH + 1):
        if depth == MAX_DEPTH and any(isinstance(value, dict | list) for value in level):
            raise ValueError(
                f"it is nested too deeply: at most {MAX_DEPTH} lists and objects within each other"
            )
        children: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                children += [*value.values(), *(value if strings else ())]
            elif isinstance(value, list):
                children += value
            elif strings and isinstance(value, str):
                _check_surrogates(value)
        level = children


def _check_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None


class Fields:
    """A JSON object with typed accessors for its fields. An accessor raises FieldError, whose message has the
    dotted path of the field, for a wrong value or a missing field (but `number` returns None for a missing
    one). The constructor raises FieldError for a value that is no object."""

    def __init__(self, value: Json, name: str = "") -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{name or 'the document'} must be an object, found {describe(value)}")
        self.value, self.name = value, name

    def only(self, *names: str) -> Fields:
        """Returns this JSON object. Raises FieldError if it has a key that is not among `names`."""
        unknown = sorted(set(self.value) - set(names))
        if unknown:
            raise FieldError(f"unknown field {self._path(unknown[0])}")
        return self

    def text(self, key: str, pattern: str | None = None) -> str:
        """Returns the string in the field `key` of the JSON object: 1 to 1000 printable characters that match
        the regular expression `pattern` as a whole; None allows any. Raises FieldError if the field is
        missing or has another value."""
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
        numbers = [item for item in value if is_integer(item) and 0 <= item <= maximum]
        if len(numbers) != len(value):
            raise self._wrong(key, f"a list of integers from 0 to {maximum}", value)
        return tuple(numbers)

    def number(self, key: str, minimum: float, maximum: float) -> float | None:
        """Returns the number in the field `key` of the JSON object as a float, or None where the field is
        absent or null. Raises FieldError for a number below `minimum` or above `maximum`, and for any other
        type."""
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
        shown = printable(key)  # Keys are untrusted text, and a message is one line.
        return f"'{self.name.strip(chr(39))}.{shown}'" if self.name else f"'{shown}'"

    def _wrong(self, key: str, rule: str, value: Json) -> FieldError:
        return FieldError(f"{self._path(key)} must be {rule}, found {describe(value)}")


def is_line(value: Json) -> TypeGuard[str]:
    """Returns True if `value` is a non-empty string of at most 1000 printable characters (no line break, no
    terminal escape)."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def is_integer(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


LONGEST_MESSAGE = 4000
"""Maximum characters of an error message; longer ones are cut."""


def printable(text: object, longest: int = LONGEST_MESSAGE) -> str:
    """Returns `text` as one line that is safe in a terminal, a log and a UTF-8 file.

    A text of more than `longest` characters is first cut to that length, of which the last three are "...".
    Then characters that are not printable, such as line breaks, control characters (and so all escape
    sequences of terminals), directional overrides and unpaired surrogates, are written as Python escapes.
    """
    line = str(text)
    if len(line) > longest:
        line = f"{line[: longest - 3]}..."
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def describe(value: object) -> str:
    """Returns any value as text for an error message: its Python expression (`repr`), or, if that has more
    than 60 characters, the first 57 and "...". An integer of more than 1024 bits is described by its number
    of bits instead. Of a long string, list or dict only the beginning is formatted, so it takes no longer."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > 60:
            return f"{text[:57]}..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yields the Python expression (`repr`) of a value in pieces. Strings are cut to 80 characters; an
    integer of more than 1024 bits is described by its number of bits."""
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
    """Returns a deep copy of a JSON value in which Mappings are dicts, whose keys are converted by str(), and
    tuples are lists. Raises TypeError for values JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")
