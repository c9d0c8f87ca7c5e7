"""Parses and checks the JSON bodies of requests, and returns their fields by type. An invalid body raises
RequestError; for an invalid field, the error names it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from mlcbuild_format import strict_json
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, describe, is_integer, printable

MAX_DEPTH = 200
"""Maximum depth of nested lists and objects in a body."""


MAX_VALUES, MAX_CONTAINERS, MAX_FIELDS = 1 << 20, 1 << 17, 1 << 16
"""Maximum values in a body at any depth, maximum lists and objects among them, and maximum fields of all
objects: two bytes of JSON can take a hundred bytes of memory, and Python's decoder blocks all other threads
for half a microsecond per field."""
_WINDOW = 1 << 16
"""Number of bytes of a request body that are searched with a regular expression at a time. The search blocks
all other threads, including the event loop; over a whole body of 8 MB it would do so for 0.2 s."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_WHOLE_TEXTS = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# Without either, a number has less than 200 digits and an exponent below 100: it is less than 1e299.
_VAST = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{200}")
_LONGEST_MATCH = 200
"""Maximum length, in bytes, of a match of _HALF (half of a surrogate pair) or _VAST (a number that may be
infinite as a float) in a request body: the parts of the body that are searched overlap by as many bytes."""


def parse_body(data: bytes) -> dict[str, Json]:
    """Returns the JSON object of a request body. Raises RequestError for anything else, including NaN,
    Infinity and duplicate keys: status 413 for too many values, else 400."""
    try:
        body = parse_json(data)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, found {describe(body)}")
    return body


def parse_json(data: bytes, where: str = "") -> Json:
    """Returns the value of JSON text from a client, in its body or in the field `where`. Raises ValueError
    for invalid JSON (also NaN, Infinity and duplicate keys), text that is not UTF-8, and more than 200
    levels, and RequestError for valid JSON that cannot be processed: too many values, lists and objects, or
    fields (413), unpaired surrogates, and numbers that are infinite as floats (but not one that is itself the
    value of a field of the body, which is left to the check of that field)."""
    if _has_too_many([data]) and _has_too_many(_without_texts(data)):
        raise RequestError(
            f"{where or 'the body'} has more than {MAX_VALUES} values, {MAX_CONTAINERS} lists and objects, or"
            f" {MAX_FIELDS} fields: send less at a time",
            param=where or None,
            code="request_too_large",
            status=413,
        )
    try:
        document: Json = _decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(document)
    if _matches(_HALF, data) or _matches(_VAST, data):
        _check_values(document, where)
    return document


def _has_too_many(pieces: Iterable[bytes]) -> bool:
    """Returns True if a JSON text, passed in pieces, may have more values, lists and objects, or fields than
    a body may have. They are counted by punctuation, including that inside strings."""
    containers = commas = colons = 0
    for piece in pieces:
        containers += piece.count(b"[") + piece.count(b"{")
        commas += piece.count(b",")
        colons += piece.count(b":")
        if containers > MAX_CONTAINERS or containers + commas > MAX_VALUES or colons > MAX_FIELDS:
            return True
    return False


def _without_texts(data: bytes) -> Iterator[bytes]:
    """Yields the parts of a JSON document outside of its strings and their quotation marks. A string that has
    no end is left out up to the end of the document."""
    start = 0
    while start < len(data):
        match = _WHOLE_TEXTS.match(data, start, start + _WINDOW)
        if match is None or match.end() == start:  # The text is longer than a window, or has no end.
            match = _TEXT.match(data, start)
        assert match is not None
        yield _TEXT.sub(b"", match[0])
        start = match.end()


def _matches(pattern: re.Pattern[bytes], data: bytes) -> bool:
    """Returns True if the regular expression `pattern`, whose matches have at most 200 bytes, matches
    anywhere in the data. It searches one small part after the other, so that other threads may run in
    between."""
    starts = range(0, len(data), _WINDOW)
    return any(pattern.search(data, start, start + _WINDOW + _LONGEST_MATCH) for start in starts)


def _check_values(value: Json, where: str) -> None:
    """Raises RequestError, naming the place in the body, for a string with unpaired surrogates or an infinite
    number inside a JSON value. An infinite number that is itself the value of a field of the body is left to
    the check of that field."""
    if isinstance(value, str):
        checked_text(where or "the body", value)
    elif isinstance(value, float) and not math.isfinite(value) and not where.isidentifier():
        raise RequestError(f"{where} is a number that is too large: found {value}", param=where)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_values(item, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            checked_text(f"a key of {where or 'the body'}", key)
            _check_values(item, f"{where}.{key[:60]}" if where else key[:60])


def _check_depth(body: Json) -> None:
    level: list[Json] = [body]
    for _ in range(MAX_DEPTH):
        children: list[Json] = []
        for item in level:
            parts = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            children += [part for part in parts if isinstance(part, dict | list)]
        level = children
        if not level:
            return
    raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} lists and objects within each other")


_decode = strict_json.decoder()
MAX_INTEGER = (1 << 31) - 1


@dataclass(frozen=True)
class Field:
    """One field that a request body may have. Its JSON schema is used for the check and shown in
    /openapi.json."""

    schema: Mapping[str, Json]
    """JSON Schema of the values that this field of a request body may have. RequestBody checks `enum`, the
    types boolean, object and string, and the types integer and number with both `minimum` and `maximum`; the
    code that reads the field checks the rest."""
    about: str = ""
    neutral: bool = False
    """True for a field that requests a feature which this server lacks; `schema` then lists the values that
    do not request it, and only these are accepted."""


Table = Mapping[str, Field]
"""Name of a field -> its schema and description, for all fields that the bodies of an endpoint, or an object
in them, may have. Other fields are refused."""


def integer(low: int, high: int = MAX_INTEGER, about: str = "") -> Field:
    return Field({"type": "integer", "minimum": low, "maximum": high}, about)


def number(low: float, high: float, about: str = "") -> Field:
    return Field({"type": "number", "minimum": low, "maximum": high}, about)


def boolean(about: str = "") -> Field:
    return Field({"type": "boolean"}, about)


def text(about: str = "") -> Field:
    return Field({"type": "string"}, about)


def structure(about: str = "") -> Field:
    return Field({"type": "object"}, about)


def choice(*values: str, about: str = "") -> Field:
    return Field({"enum": [*values]}, about)


def ignored(*names: str) -> dict[str, Field]:
    """Returns the table entries for request fields that the server accepts and ignores: name of the field ->
    Field (an empty JSON schema and a sentence for /openapi.json)."""
    return {name: Field({}, "Ignored: it changes nothing in the answer.") for name in names}


def neutral(**values: tuple[Json, ...]) -> dict[str, Field]:
    """Returns the table entries for request fields of features that this server lacks: name of the field ->
    Field (its JSON schema and a sentence for /openapi.json). values: name of the field -> the values that do
    not request the feature; only these are accepted."""
    about = "Not supported: only values that request nothing are accepted."
    return {name: Field({"enum": [*allowed]}, about, neutral=True) for name, allowed in values.items()}


def suggestion(key: str, table: Table) -> str:
    """Returns the name of the field in `table` that an unknown name resembles; "" if there is none. A field
    of the opposite meaning (min instead of max) does not count."""
    words = set(key.split("_"))
    for close in get_close_matches(key, table, n=3, cutoff=0.7):
        other = set(close.split("_"))
        if not ({"min", "max"} <= words ^ other):
            return close
    return ""


class RequestBody:
    """The fields of one request body. A value of null means absent. Creating it raises RequestError, which
    names the field, for a field that is not in `table`, and for a value without the type, the bounds or the
    enumerated values of the field's schema. The code that reads a field must check lists and their items, and
    values whose schema allows several types."""

    def __init__(self, body: Mapping[str, Json], table: Table) -> None:
        self._values = {key: value for key, value in body.items() if value is not None}
        for key, value in self._values.items():
            field = table.get(key)
            if field is None:
                close = suggestion(key, table)
                hint = f"; did you mean '{close}'?" if close else ""
                param = printable(key[:60])
                raise RequestError(f"unknown field '{param}'{hint}", param=param, code="unknown_field")
            _check(key, value, field)

    def get(self, key: str) -> Json:
        """Returns the unchanged value of a field of the body; None if it is absent."""
        return self._values.get(key)

    def integer(self, key: str) -> int | None:
        value = self._values.get(key)
        assert value is None or is_integer(value)
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key, default)
        assert isinstance(value, bool)
        return value

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        assert value is None or isinstance(value, int | float)
        return None if value is None else float(value)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        assert value is None or isinstance(value, str)
        return None if value is None else checked_text(key, value)

    def object(self, key: str) -> dict[str, Json]:
        """Returns the JSON object in a field of the body; {} if the field is absent. The field's schema must
        have the type `object`, so that another value was refused when the body was checked."""
        value = self._values.get(key, {})
        assert isinstance(value, dict)
        return value


def _check(key: str, value: Json, field: Field) -> None:
    """Raises RequestError unless a value has the type, the bounds and the enumerated values that the JSON
    schema of its field states; the type array and other rules of the schema are not checked here."""
    schema = field.schema
    match schema:
        case {"enum": list(allowed)}:
            if not is_among(value, allowed):
                raise not_among(key, value, allowed, field.neutral)
        case {"type": "integer", "minimum": int(low), "maximum": int(high)}:
            if not is_integer(value) or not low <= value <= high:
                raise wrong(key, f"an integer from {low} to {high}", value)
        case {"type": "number", "minimum": int(low) | float(low), "maximum": int(high) | float(high)}:
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise wrong(key, f"a number from {low:g} to {high:g}", value)
        case {"type": str(kind)} if kind in _KINDS and not isinstance(value, _KINDS[kind][0]):
            raise wrong(key, _KINDS[kind][1], value)


def is_among(value: Json, allowed: Sequence[Json]) -> bool:
    """Returns True if a JSON value equals one of the allowed ones. True and False are no numbers here."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


_KINDS: Mapping[str, tuple[type, str]] = {
    "boolean": (bool, "true or false"),
    "object": (dict, "an object"),
    "string": (str, "a text"),
}


def not_among(key: str, value: Json, allowed: Sequence[Json], neutral: bool) -> RequestError:
    """Returns the error for a field whose value is not among the allowed ones. neutral: True for a feature
    that this server lacks, whose allowed values are those that do not request it."""
    listed = " or ".join(json.dumps(item) for item in allowed)
    if not neutral:
        return wrong(key, listed, value)
    other = f" or send {listed}" if allowed else ""
    return RequestError(
        f"{key} is {describe(value)}, which this server does not support: leave it out{other}",
        param=key,
        code="unsupported_field",
    )


def checked_text(where: str, text: str) -> str:
    r"""Returns a client's text unchanged. Raises RequestError, naming the place `where`, for unpaired
    surrogates: JSON can write them ("\ud800"), UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds half of a surrogate pair at character {error.start}, which is no text",
            param=where,
        ) from None
    return text


def wrong(key: str, rule: str, value: Json) -> RequestError:
    finding = "it is missing" if value is None else f"found {describe(value)}"
    return RequestError(f"{key} must be {rule}; {finding}", param=key)
