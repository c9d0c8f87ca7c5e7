"""Typed access to a request's body: every fault is a RequestError that names the field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, describe, is_integer

MAX_DEPTH = 200
"""Lists and objects within each other."""


def parse_body(data: bytes) -> dict[str, Json]:
    """The JSON object of a request. Raises RequestError; NaN and Infinity are not JSON, and what has a key
    twice could mean two things."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_twins)
        _check_depth(body)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, found {describe(body)}")
    return body


def _no_twins(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twin, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key '{twin[:60]}' is there twice")
    return found


def _check_depth(body: Json) -> None:
    level: list[Json] = [body]
    for _ in range(MAX_DEPTH):
        inside: list[Json] = []
        for item in level:
            parts = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            inside += [part for part in parts if isinstance(part, dict | list)]
        level = inside
        if not level:
            return
    raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} lists and objects within each other")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


MAX_INTEGER = (1 << 31) - 1


@dataclass(frozen=True)
class Field:
    """One field of a body. Its schema is what is checked and what /openapi.json shows."""

    schema: Mapping[str, Json]
    """JSON Schema of its values. `type` (of one kind, not array), `minimum`, `maximum` and `enum` are checked
    here, the rest by the code that reads the field."""
    about: str = ""
    neutral: bool = False
    """What it is for cannot be honoured: the schema's values are those that ask for nothing."""


Table = Mapping[str, Field]
"""The fields that a body may have."""


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
    """Fields that change nothing in the answer."""
    return {name: Field({}, "Ignored: it changes nothing in the answer.") for name in names}


def neutral(**values: tuple[Json, ...]) -> dict[str, Field]:
    """Fields that cannot be honoured, with the values that ask for nothing."""
    about = "Cannot be honoured: only values that ask for nothing are accepted."
    return {name: Field({"enum": [*allowed]}, about, neutral=True) for name, allowed in values.items()}


class Body:
    """One body. null means absent. Every fault is a RequestError that names the field."""

    def __init__(self, body: Mapping[str, Json], table: Table) -> None:
        self._values = {key: value for key, value in body.items() if value is not None}
        for key, value in self._values.items():
            field = table.get(key)
            if field is None:
                close = get_close_matches(key, table, n=1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise RequestError(f"unknown field '{key[:60]}'{hint}", param=key[:60], code="unknown_field")
            _check(key, value, field)

    def get(self, key: str) -> Json:
        """As it is; None where it is absent."""
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
        """Empty where it is absent."""
        value = self._values.get(key, {})
        assert isinstance(value, dict)
        return value


def _check(key: str, value: Json, field: Field) -> None:
    """A value against the simple part of its schema."""
    schema = field.schema
    match schema:
        case {"enum": list(allowed)}:
            if not any(
                value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
            ):
                raise _not_among(key, value, allowed, field.neutral)
        case {"type": "integer", "minimum": int(low), "maximum": int(high)}:
            if not is_integer(value) or not low <= value <= high:
                raise wrong(key, f"an integer from {low} to {high}", value)
        case {"type": "number", "minimum": int(low) | float(low), "maximum": int(high) | float(high)}:
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise wrong(key, f"a number from {low:g} to {high:g}", value)
        case {"type": str(kind)} if kind in _KINDS and not isinstance(value, _KINDS[kind][0]):
            raise wrong(key, _KINDS[kind][1], value)


_KINDS: Mapping[str, tuple[type, str]] = {
    "boolean": (bool, "true or false"),
    "object": (dict, "an object"),
    "string": (str, "a text"),
}


def _not_among(key: str, value: Json, allowed: Sequence[Json], neutral: bool) -> RequestError:
    listed = " or ".join(json.dumps(item) for item in allowed)
    if not neutral:
        return wrong(key, listed, value)
    other = f" or send {listed}" if allowed else ""
    return RequestError(
        f"{key} is {describe(value)}, which this server cannot honour: leave it out{other}",
        param=key,
        code="unsupported_field",
    )


def checked_text(where: str, text: str) -> str:
    r"""Refuses halves of surrogate pairs: JSON can write them ("\ud800"), UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds half of a surrogate pair at character {error.start}, which is no text",
            param=where,
        ) from None
    return text


def wrong(key: str, wanted: str, found: Json) -> RequestError:
    what = "it is missing" if found is None else f"found {describe(found)}"
    return RequestError(f"{key} must be {wanted}; {what}", param=key)
