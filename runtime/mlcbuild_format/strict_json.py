"""JSON that someone else wrote, without what the standard leaves to each reader: duplicate keys, NaN."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn


class JsonError(ValueError):
    """A document that some readers of JSON accept. The message ends a sentence."""


def decoder(
    parse_int: Callable[[str], object] | None = None, parse_float: Callable[[str], object] | None = None
) -> Callable[[str], Any]:
    """Returns a function from a JSON text to its value.

    It raises ValueError for what is no JSON, JsonError for a key that stands twice in an object, for NaN,
    Infinity and a byte order mark, and RecursionError for a text that is nested too deeply.
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
