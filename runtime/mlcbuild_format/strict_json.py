"""Decodes JSON strictly: it refuses whatever readers interpret differently, such as duplicate keys, NaN and a
byte order mark.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn


class JsonError(ValueError):
    """The error for a document that some JSON readers accept and others refuse. Its message is the reason,
    such as "NaN is not JSON"."""


def decoder(
    parse_int: Callable[[str], object] | None = None, parse_float: Callable[[str], object] | None = None
) -> Callable[[str], Any]:
    """Returns a function that decodes a JSON text; the parameters convert numbers, as in json.JSONDecoder.

    The function raises ValueError for invalid JSON, JsonError, a ValueError, for a duplicate key, NaN,
    Infinity or a byte order mark, and RecursionError for a text that is nested too deeply.
    """
    decode = json.JSONDecoder(
        object_pairs_hook=_unique_keys,
        parse_int=parse_int,
        parse_float=parse_float,
        parse_constant=_no_constant,
    ).decode

    def read(text: str) -> Any:
        if text.startswith("\ufeff"):
            raise JsonError("it begins with a byte order mark (BOM)")
        return decode(text)

    return read


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        shown = json.dumps(twice[:60])[1:-1].replace("'", "\\'")
        raise JsonError(f"the key '{shown}' is there twice")
    return value


def _no_constant(text: str) -> NoReturn:
    raise JsonError(f"{text} is not JSON")


_decode = decoder()


def parse(data: bytes | str) -> Any:
    """Returns the value of a JSON document, a str or bytes in UTF-8. Raises ValueError for invalid JSON, and
    JsonError, a ValueError, for a document that JSON readers interpret differently (duplicate keys, NaN, a
    byte order mark) or that is nested too deeply for Python's decoder."""
    try:
        return _decode(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
