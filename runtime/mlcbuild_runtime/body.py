"""Typed access to a request's body: every fault is a RequestError that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, describe, is_integer


def parse_body(data: bytes) -> dict[str, Json]:
    """The JSON object of a request. Raises RequestError; NaN and Infinity are not JSON."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, found {describe(body)}")
    return body


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


class Body:
    """One body. null means absent. Every accessor raises RequestError, naming the field."""

    def __init__(
        self, body: Mapping[str, Json], known: Sequence[str], neutral: Mapping[str, tuple[Json, ...]]
    ) -> None:
        """`neutral`: fields that cannot be honoured, with the values that ask for nothing."""
        self._values = {key: value for key, value in body.items() if value is not None}
        for key, value in self._values.items():
            if key in neutral:
                _check_neutral(key, value, neutral[key])
            elif key not in known:
                close = get_close_matches(key, known, n=1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise RequestError(f"unknown field '{key}'{hint}", param=key, code="unknown_field")

    def get(self, key: str) -> Json:
        """As it is; None where it is absent."""
        return self._values.get(key)

    def integer(self, key: str, low: int, high: int = (1 << 31) - 1) -> int | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise wrong(key, f"an integer from {low} to {high}", value)
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise wrong(key, "true or false", value)
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def object(self, key: str) -> dict[str, Json]:
        """Empty where it is absent."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise wrong(key, "an object", value)
        return value


def _check_neutral(key: str, value: Json, allowed: Sequence[Json]) -> None:
    if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        return
    other = f" or send {' or '.join(json.dumps(item) for item in allowed)}" if allowed else ""
    raise RequestError(
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
