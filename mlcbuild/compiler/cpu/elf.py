"""Reads the undefined symbols of an ELF library (System V ABI, 64 bit, little endian)."""

from __future__ import annotations

import struct

_DYNSYM = 11
_UNDEFINED = 0
_WEAK = 2


def undefined(data: bytes) -> frozenset[str]:
    """Returns the names of the dynamic symbols that a shared library requires from its process. Weak symbols,
    which may be absent, are left out.

    data: the bytes of the library. Raises ValueError if they are not a 64-bit little-endian ELF file,
    ValueError or struct.error if they are cut off.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    required: set[str] = set()
    for index in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", data, start + index * size)
        if kind == _DYNSYM:
            (names,) = struct.unpack_from("<Q", data, start + link * size + 24)
            required |= {_text(data, names + name) for name in _needed(data[offset : offset + length])}
    return frozenset(required)


def _needed(table: bytes) -> list[int]:
    """Returns the offsets, in the ELF string table, of the names of the undefined, not weak symbols in an ELF
    symbol table, whose bytes are passed. Raises struct.error if its last entry is cut off."""
    return [
        name
        for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table)
        if name and section == _UNDEFINED and info >> 4 != _WEAK
    ]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
