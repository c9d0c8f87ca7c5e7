"""Finds the positions of uncompressed members of a zip file, without reading the members.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

_END, _END64, _PLACE64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_MEMBER, _LOCAL = b"PK\1\2", b"PK\3\4"
_LONGEST_TAIL = 22 + 0xFFFF
"""Maximum size in bytes of a zip file's end record, whose comment has at most 65,535 bytes."""
LARGEST_DIRECTORY = 8 << 20
"""Maximum size in bytes of a central directory; a zip file with a larger one is refused. A PyTorch file needs
about 100 bytes for each tensor."""
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
"""Values of 16-bit and 32-bit fields of a zip file that mean: the number is in a zip64 record."""


class ZipError(ValueError):
    """The error for a file that is no zip file or a damaged one, and for members that are missing, compressed
    or encrypted. Its message does not name the file.
    """


@dataclass(frozen=True)
class Member:
    """A member of a zip file, as the zip file's central directory describes it."""

    header: int
    """Offset in bytes of the member's local header in the zip file."""
    size: int
    """Size in bytes of the zip file's member when it is not compressed."""
    is_plain: bool
    """True if the zip file's member is stored uncompressed and unencrypted."""


def members(file: BinaryIO) -> dict[str, Member]:
    """Reads the central directory of a zip file, and returns member name -> member. Raises OSError if the
    file cannot be read, ZipError if it is damaged or of an unsupported kind.
    """
    count, size, start = _directory(file)
    file.seek(start)
    data = file.read(size)
    by_name: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _MEMBER or len(data) < at + 46:
            raise ZipError("its central directory is damaged")
        flags, method = struct.unpack_from("<HH", data, at + 8)
        stored, content_size, name_size, extra_size, comment_size = struct.unpack_from(
            "<IIHHH", data, at + 20
        )
        (header,) = struct.unpack_from("<I", data, at + 42)
        extra = at + 46 + name_size
        at = extra + extra_size + comment_size
        if at > len(data):
            raise ZipError("its central directory is damaged")
        name = data[extra - name_size : extra].decode("utf-8", "replace")
        if name in by_name:
            raise ZipError("two of its members have the same name")
        wide = iter(_zip64(data[extra : extra + extra_size]))
        content_size, stored, header = (
            next(wide, value) if value == _FULL32 else value for value in (content_size, stored, header)
        )
        by_name[name] = Member(header, content_size, method == 0 and not flags & 1 and stored == content_size)
    return by_name


def _directory(file: BinaryIO) -> tuple[int, int, int]:
    """Returns (number of members, size, offset) of a zip file's central directory, the list of its members;
    size and offset are in bytes. Raises ZipError if the file has none, if its end record contradicts the
    file, or if the directory has more than 8 MiB.
    """
    end = file.seek(0, os.SEEK_END)
    first = file.seek(max(0, end - _LONGEST_TAIL))
    tail = file.read(_LONGEST_TAIL)
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        raise ZipError("it has no end record, so it is truncated or no zip file")
    count, size, start = struct.unpack_from("<HII", tail, at + 10)
    if count == _FULL16 or _FULL32 in (size, start):
        count, size, start = _wide_directory(file, tail, at)
    if start + size > first + at or 46 * count > size:
        raise ZipError("its end record contradicts the file")
    if size > LARGEST_DIRECTORY:
        raise ZipError(f"its central directory has {size} bytes, and at most {LARGEST_DIRECTORY} are read")
    return count, size, start


def _wide_directory(file: BinaryIO, tail: bytes, at: int) -> tuple[int, int, int]:
    if at < 20 or tail[at - 20 : at - 16] != _PLACE64:
        raise ZipError("its end record lacks the zip64 record that it names")
    (offset,) = struct.unpack_from("<Q", tail, at - 12)
    file.seek(min(offset, 1 << 62))
    record = file.read(56)
    if len(record) < 56 or record[:4] != _END64:
        raise ZipError("its zip64 end record is damaged")
    count, size, start = struct.unpack_from("<QQQ", record, 32)
    return count, size, start


def _zip64(extra: bytes) -> tuple[int, ...]:
    """Returns the 64-bit integers (sizes and offsets) in the zip64 field among a zip member's extra fields,
    whose bytes are passed; () if there is none. Incomplete integers at the field's end are ignored."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + size // 8 * 8]
            return struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8])
        at += 4 + size
    return ()


def place(file: BinaryIO, by_name: Mapping[str, Member], name: str) -> tuple[int, int]:
    """Returns (offset, size), in bytes, of the content of the member `name` in a zip file. by_name: member
    name -> Member, as the file's central directory lists them. Raises OSError if the file cannot be read,
    ZipError if the member is missing, compressed, encrypted or damaged.
    """
    member = by_name.get(name)
    name = name[-80:]
    if member is None:
        raise ZipError(f"it lacks its member '{name}'")
    if not member.is_plain:
        raise ZipError(f"its member '{name}' is compressed or encrypted")
    end = file.seek(0, os.SEEK_END)
    file.seek(min(member.header, end))
    header = file.read(30)
    if len(header) < 30 or header[:4] != _LOCAL:
        raise ZipError(f"the header of its member '{name}' is damaged")
    start = member.header + 30 + sum(struct.unpack_from("<HH", header, 26))
    if start + member.size > end:
        raise ZipError(f"its member '{name}' ends after the end of the file")
    return start, member.size
