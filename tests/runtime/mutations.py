"""Changes files of a bundle at random so that they are damaged but can still be parsed.

Equal seeds give equal damage on every machine, so that a failure can be reproduced.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import toy

RAW = "\0raw:"
"""Prefix of strings in mutated JSON documents. The text after it is written as it is, so that a document may
contain what json.dumps does not write, such as NaN or duplicate keys."""
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -0.0, 0.5, 1e308,
    f"{RAW}NaN", f"{RAW}1e999", f"{RAW}-Infinity", f"{RAW}{'9' * 5000}", f"{RAW}{'[' * 100_000}",
    f'{RAW}{{"a":1,"a":2}}', f"{RAW}{'[' * 500}{']' * 500}", f"{RAW}{'[' * 60}{']' * 60}",
    "", "x", "\0", "\x1b[31m\r\n", "\ud800", "a\udc00b", "\u202e", "é", "🙂", "x" * 100_000, "/etc/passwd",
    "../x", "C:\\x", "con", "x.", [], [[]], [None], ["x"], [1, "x"], {}, {"": ""}, {"a": {"b": []}},
    {"\ud800": 1}, {"type": "x"}, {"content": 1}, [{"name": ["x"]}], [{}],
]  # fmt: skip


def document(rng: random.Random, value: Any) -> bytes:
    """Returns the JSON text of a copy of `value` that is changed at random in one to three places."""
    holder = {"": json.loads(json.dumps(value))}
    for _ in range(rng.randint(1, 3)):
        _change(rng, holder)
    text = json.dumps(holder[""])
    parts = text.split(f'"{json.dumps(RAW)[1:-1]}')
    return (
        parts[0]
        + "".join(part.replace('\\"', "\1").replace('"', "", 1).replace("\1", '"') for part in parts[1:])
    ).encode()


def change_value(rng: random.Random, roots: list[Any]) -> None:
    """Replaces one value at a random place in JSON objects or lists by another one of the same type; a whole
    number also by one near it. Changes `roots` in place."""
    places: list[tuple[Any, Any]] = []
    todo = list(roots)
    while todo:
        parent = todo.pop()
        for key in parent if isinstance(parent, dict) else range(len(parent)):
            if isinstance(parent[key], dict | list):
                todo.append(parent[key])
            else:
                places.append((parent, key))
    parent, key = rng.choice(places)
    value = parent[key]
    others = [holder[name] for holder, name in places if type(holder[name]) is type(value)]
    near = [value + 1, 2 * value, value // 2, 256] if isinstance(value, int) else []
    parent[key] = rng.choice([*others, *near])


def _change(rng: random.Random, holder: dict[str, Any]) -> None:
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [holder]
    while todo:
        parent = todo.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        for key in list(keys)[:40]:
            places.append((parent, key))
            if isinstance(parent[key], dict | list):
                todo.append(parent[key])
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0 if parent is not holder:
            del parent[key]
        case 1 if isinstance(parent, dict) and parent is not holder:
            name = rng.choice([item for item in NASTY if isinstance(item, str) and not item.startswith(RAW)])
            parent[name] = parent.pop(key)
        case 2:
            parent[key] = [parent[key]]
        case 3 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] += rng.choice([-1, 1, 1 << 20, -(1 << 40), 1 << 62])
        case _:
            parent[key] = rng.choice(NASTY)


def noise(rng: random.Random, data: bytes) -> bytes:
    """Returns bytes damaged at random, without regard to their meaning."""
    match rng.randrange(5):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return b"\xef\xbb\xbf" + data
        case 2:
            return b""
        case 3:
            place = rng.randrange(len(data))
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        case _:
            return data + rng.choice([b"\0", b"\xff", data])


def weights(rng: random.Random, data: bytes) -> bytes:
    """Returns a damaged copy of a weights file in safetensors format: a value in its JSON header is replaced,
    or the number that states the header's length. data: content of the file."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        return rng.choice([0, 1, length - 1, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    header = document(rng, json.loads(data[8 : 8 + length]))
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


NUMBERS = [0, 1, 7, 0xFFF, 0x1000, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def library(rng: random.Random, data: bytes) -> bytes:
    """Returns a shared library in which one or two random values of its headers, or of the tables that the
    system's loader reads, are changed."""
    actual = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        place, width = rng.choice(_fields(data))
        (old,) = struct.unpack_from({1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[width], actual, place)
        new = rng.choice(
            [*NUMBERS, old + 1, old - 1, old + 0x1000, old * 2, old ^ 1 << rng.randrange(8 * width)]
        )
        actual[place : place + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(actual)


def _fields(data: bytes) -> list[tuple[int, int]]:
    """Returns (offset, number of bytes) of each value in an ELF file's header, program headers and dynamic
    section, and in the tables to which they point."""
    header = [(4, 1), (5, 1), (16, 2), (18, 2), (32, 8), (40, 8), (52, 2), (54, 2), (56, 2), (58, 2), (60, 2)]
    (start,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    segments, tables = [], []
    for i in range(count):
        place = start + 56 * i
        segments += [(place, 4), (place + 4, 4), *((place + at, 8) for at in range(8, 56, 8))]
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, place)
        if kind == 2:
            tables = [(offset + at, 8) for at in range(0, size, 8)]
    values = dict(struct.iter_unpack("<QQ", data[tables[0][0] : tables[-1][0] + 8]))
    inside = []
    for tag in (0x6FFFFEF5, 6, 7, 23):
        at = values.get(tag, 0)  # these lie in the first segment, whose addresses are offsets
        inside += [(at + 4 * rng_at, 4) for rng_at in range(48)] if at else []
    return [*header, *segments * 2, *tables * 2, *inside]


Mutation = Callable[[random.Random, bytes], bytes]


def as_json(rng: random.Random, data: bytes) -> bytes:
    return noise(rng, data) if rng.random() < 0.15 else document(rng, json.loads(data))


MUTATIONS: Mapping[str, Mutation] = {
    "bundle.json": as_json,
    "tokenizer.json": as_json,
    "tokenizer_config.json": as_json,
    "weights-00001-of-00001.safetensors": weights,
    "model.so": library,
}


def damage(bundle: Path, name: str, seed: int) -> None:
    """Changes the file `name` of a bundle at random, and updates its size and digest in the manifest. Equal
    seeds give equal changes."""
    rng = random.Random(f"{name} {seed}")
    path = bundle / name
    path.write_bytes(MUTATIONS[name](rng, path.read_bytes()))
    if name != "bundle.json":
        manifest = json.loads((bundle / "bundle.json").read_bytes())
        manifest["files"][name] = vars(toy.describe(path))
        (bundle / "bundle.json").write_text(json.dumps(manifest))
