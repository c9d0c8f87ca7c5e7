"""Mutates data according to its structure: JSON trees, lines of text, bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Json = Any


class Raw(str):
    """Text that `dumped` writes into JSON as it is, without quotes, such as 1e999."""

    __slots__ = ()


ODD_NUMBERS: tuple[Json, ...] = (
    *(0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 0.5, -0.0),
    *(Raw("1e999"), Raw("-1e999"), Raw("1" * 5000), Raw("1e-999"), Raw("NaN"), Raw("Infinity")),
)
ODD_TEXTS: tuple[Json, ...] = (
    *("", " ", "\x00", "\ud800", "é", "x" * 300, "x" * 70_000, "\x1b[31mred\x1b[0m", "a\nb", "\u202e", "%s"),
    *("../up", "/etc/passwd", "a/../b", "a//b", ".", "..", "con", "a\\b", "http://[", "{{ 7 * 7 }}", "null"),
)
DEEP = Raw("[" * 400 + "]" * 400)
ODD_VALUES: tuple[Json, ...] = (None, True, False, [], {}, [[]], {"": 0}, {"\ud800": 1}, DEEP)


def pick_value(random: Random) -> Json:
    return deepcopy(random.choice(random.choice((ODD_NUMBERS, ODD_TEXTS, ODD_VALUES))))


def mutated_json(random: Random, document: Json, times: int = 0) -> Json:
    """Returns a copy of a JSON document with random changes: values replaced, exchanged, repeated, removed or
    wrapped in a list or object, and keys renamed. times: number of changes; 0: one to four.
    """
    root = [deepcopy(document)]
    for _ in range(times or random.choice((1, 1, 1, 2, 3, 4))):
        holder, key = _place(random, root)
        if holder is root:
            key = 0
        _change(random, holder, key)
    return root[0]


def _place(random: Random, root: list[Json]) -> tuple[Any, Any]:
    """Returns (container, key) of a random place in a document, chosen by walking down from the root. root: a
    list with the document as its only item, so that the whole document, (root, 0), is a possible place."""
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.85:
        holder = holder[key]
        key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    return holder, key


def _change(random: Random, holder: Any, key: Any) -> None:
    kind = random.random()
    if kind < 0.5:
        holder[key] = pick_value(random)
    elif kind < 0.6 and len(holder) > 1:
        del holder[key]
    elif kind < 0.7 and isinstance(holder, dict):
        holder[random.choice(("", "x", "\ud800", str(key).upper(), f"{key} "))] = holder.pop(key)
    elif kind < 0.8 and isinstance(holder, dict):
        other = random.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind < 0.9 and isinstance(holder, list):
        holder.extend([holder[key]] * random.choice((1, 2, 1000)))
    else:
        holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}


def dumped(document: Json) -> bytes:
    """Returns a mutated document as JSON bytes. Unpaired surrogates are written as escapes, and a text of the
    class `Raw`, such as 1e999, without quotes as it is.
    """
    marks: list[str] = []

    def mark(value: Json) -> Json:
        if isinstance(value, Raw):
            marks.append(str(value))
            return f"\x02raw{len(marks) - 1}\x02"
        if isinstance(value, dict):
            return {name: mark(inner) for name, inner in value.items()}
        return [mark(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(mark(document))
    for number, raw in enumerate(marks):
        text = text.replace(f'"\\u0002raw{number}\\u0002"', raw)
    return text.encode()


def mutated_bytes(random: Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Returns bytes with one to four random changes: a flipped bit, a part removed or repeated, the end cut
    off, or a text inserted or put in place of a part. words: such texts, in addition to some fixed ones.
    """
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 2, 8, 64, 1024)))
        change: Callable[[], bytes] = random.choice(_CHANGES)(random, data, at, end, words)
        data = change()
    return data


def _flip(random: Random, data: bytes, at: int, end: int, _: tuple[bytes, ...]) -> Callable[[], bytes]:
    bit = 1 << random.randrange(8)
    return lambda: data[:at] + bytes(byte ^ bit for byte in data[at : min(end, at + 1)]) + data[at + 1 :]


def _cut(_r: Random, data: bytes, at: int, end: int, _: tuple[bytes, ...]) -> Callable[[], bytes]:
    return lambda: data[:at] + data[end:]


def _end(_r: Random, data: bytes, at: int, _e: int, _: tuple[bytes, ...]) -> Callable[[], bytes]:
    return lambda: data[:at]


def _repeat(random: Random, data: bytes, at: int, end: int, _: tuple[bytes, ...]) -> Callable[[], bytes]:
    return lambda: data[:end] + data[at:end] * random.choice((1, 3, 100)) + data[end:]


def _put(random: Random, data: bytes, at: int, end: int, words: tuple[bytes, ...]) -> Callable[[], bytes]:
    chosen = random.choice((*words, b"\x00", b"\xff" * 8, b"\r\n", b"\xc3\x28", b"9" * 30))
    return lambda: data[:at] + chosen + data[random.choice((at, end)) :]


_CHANGES = (_flip, _cut, _end, _repeat, _put, _put)


def mutated_lines(random: Random, text: str, words: tuple[str, ...]) -> bytes:
    """Returns the UTF-8 bytes of a text with one to three random changes: a line removed, copied to another
    place or prefixed with YAML syntax such as "- ", or a word replaced or extended. words: texts that replace
    or extend words, in addition to some fixed ones."""
    lines = text.splitlines()
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(lines))
        kind = random.random()
        if kind < 0.15 and len(lines) > 1:
            del lines[at]
        elif kind < 0.3:
            lines.insert(random.randrange(len(lines) + 1), lines[at])
        elif kind < 0.4:
            lines[at] = random.choice(("  ", "\t", "- ", "? ", "&a ", "!!python/object ")) + lines[at]
        else:
            parts = lines[at].split(" ")
            where = random.randrange(len(parts))
            texts = [text for text in ODD_TEXTS if text != "\ud800"]
            value = random.choice((*words, *map(str, ODD_NUMBERS), *texts))
            parts[where] = value if random.random() < 0.7 else parts[where] + value
            lines[at] = " ".join(parts)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
