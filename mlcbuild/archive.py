"""A part of a store in one file, for machines without a network: a plain tar archive.

    mlcbuild-archive     {"format":"mlcbuild-archive/1"}
    cas/<digest>         blobs
    ac/<key>             records as they travel (mlcbuild.remotes.signing), each after its blobs

Every tar program can read it. What comes in is read here header by header, and nothing but regular members
with these names is taken; it is as little believed as a remote. It is not compressed, so that nothing grows
when it is unpacked.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from mlcbuild.canon import canonical
from mlcbuild.errors import MlcbuildError, StoreError, UsageError
from mlcbuild.keyfile import Signer
from mlcbuild.records import Record
from mlcbuild.remotes.signing import LARGEST, RefusedError, seal, unseal
from mlcbuild.staging import Session
from mlcbuild.store import Store

FORMAT = "mlcbuild-archive/1"
_FIRST = "mlcbuild-archive"
_MARK = canonical({"format": FORMAT}) + b"\n"
_BLOCK = 512
_CHUNK = 1 << 20
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a directory",
    b"6": "a pipe",
    b"S": "a sparse file",
}


@dataclass(frozen=True)
class Moved:
    """What an archive holds."""

    records: int
    blobs: int
    bytes: int


def write(store: Store, records: Iterable[Record], path: Path, signer: Signer | None = None) -> Moved:
    """Writes records with their blobs; `path` appears when it is whole. Raises StoreError when a record's
    files are not intact, MlcbuildError when the archive cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    sizes: dict[str, int] = {}
    count = 0
    try:
        with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
            _add(archive, _FIRST, io.BytesIO(_MARK), len(_MARK))
            for record in records:
                if lost := store.lost(record):
                    raise StoreError(f"{path} was not written: {lost}")
                for _, digest, size in record.rows:
                    if digest not in sizes:
                        sizes[digest] = size
                        with store.blob(digest).open("rb") as blob:
                            _add(archive, f"cas/{digest}", blob, size)
                data = seal(record, signer)
                _add(archive, f"ac/{record.key}", io.BytesIO(data), len(data))
                count += 1
        part.replace(path)
    except OSError as error:
        raise MlcbuildError(f"{path}: the archive cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return Moved(count, len(sizes), sum(sizes.values()))


def _add(archive: tarfile.TarFile, name: str, source: BinaryIO, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    archive.addfile(member, source)


def read(store: Store, path: Path, trust: Iterable[str] = ()) -> Moved:
    """Takes an archive into a store: blobs whose bytes are right, and records that follow from what they say
    and whose blobs are there. Raises UsageError, with the reason, at the first thing that must not be in an
    archive: what came before it was right, and stays. Raises StoreError.
    """
    trusted = tuple(trust)
    blobs: dict[str, int] = {}
    records = 0
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    with file, store.session() as session:
        try:
            for name, size in _members(file):
                kind, _, digest = name.partition("/")
                if name == _FIRST:
                    continue
                if kind == "cas":
                    _take_blob(store, session, file, digest, size)
                    blobs[digest] = size
                else:
                    _take_record(store, session, file, digest, size, trusted)
                    records += 1
        except RefusedError as error:
            raise UsageError(f"{path} is refused: {error}") from None
    return Moved(records, len(blobs), sum(blobs.values()))


def _members(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Name and size of each member, the file standing at its first byte. Raises RefusedError."""
    seen: set[str] = set()
    while (header := file.read(_BLOCK)).strip(b"\0"):
        name, size = _header(header)
        if not seen:
            if name != _FIRST or size != len(_MARK) or file.read(size) != _MARK:
                raise RefusedError(f"it is no archive of format {FORMAT}")
        elif not re.fullmatch(r"(ac|cas)/[0-9a-f]{64}", name):
            raise RefusedError(f"it holds a member called {name!r}")
        if name in seen:
            raise RefusedError(f"it holds {name} twice")
        if name.startswith("ac/") and size > LARGEST:
            raise RefusedError(f"{name} has {size} bytes: more than a record can")
        seen.add(name)
        start = file.tell() if name != _FIRST else _BLOCK
        yield name, size
        file.seek(start + -(-size // _BLOCK) * _BLOCK)
    if not seen:
        raise RefusedError(f"it is no archive of format {FORMAT}")
    if len(header) < _BLOCK:
        raise RefusedError("it is cut off")


def _header(header: bytes) -> tuple[str, int]:
    """Name and size in a tar header. Raises RefusedError for all but regular files."""
    if len(header) < _BLOCK:
        raise RefusedError("it is cut off")
    name = header[:100].rstrip(b"\0").decode(errors="replace")
    stated = header[148:156].strip(b" \0")
    sums = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if not re.fullmatch(rb"[0-7]+", stated) or int(stated, 8) != sums:
        raise RefusedError("it is no tar archive, or damaged" if name else "it is no tar archive")
    kind = header[156:157]
    if kind not in (b"0", b"\0"):
        what = _KINDS.get(kind, f"of the kind {kind.decode(errors='replace')!r}")
        raise RefusedError(f"its member {name!r} is {what}: only regular files are taken")
    field = header[124:136]
    if field[0] == 0x80:  # larger than octal digits can say
        return name, int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]+", digits):
        raise RefusedError(f"the size of its member {name!r} is no number")
    return name, int(digits, 8)


def _take_blob(store: Store, session: Session, file: BinaryIO, digest: str, size: int) -> None:
    if size > os.fstat(file.fileno()).st_size:
        raise RefusedError(f"cas/{digest} says that it has {size} bytes: more than the archive")
    with store.writing():
        part = session.area() / "blob"
        hasher, left = blake3(), size
        with part.open("xb") as target:
            while left and (data := file.read(min(left, _CHUNK))):
                hasher.update(data)
                target.write(data)
                left -= len(data)
    if left:
        raise RefusedError("it is cut off")
    if hasher.hexdigest() != digest:
        raise RefusedError(f"the bytes of cas/{digest} are wrong")
    store.put_blob(digest, part, hashed=True)


def _take_record(
    store: Store, session: Session, file: BinaryIO, key: str, size: int, trust: tuple[str, ...]
) -> None:
    data = file.read(size)
    if len(data) < size:
        raise RefusedError("it is cut off")
    try:
        record = unseal(key, data, trust)
    except RefusedError as error:
        raise RefusedError(f"ac/{key}: {error}") from None
    if lost := store.lost(record):
        raise RefusedError(f"ac/{key} comes before its files: {lost}")
    with store.writing():
        part = session.area() / "record"
    store.put_record(record, part)
