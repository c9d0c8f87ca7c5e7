"""Reads and writes archives: a part of a store in one plain tar file, for machines without a network.

    mlcbuild-archive     {"format":"mlcbuild-archive/1"}
    cas/<digest>         blobs
    ac/<key>             records in the form of remotes (mlcbuild.remotes.signing), each after its blobs

Every tar program can read it. This module reads headers one by one and accepts only regular members with
these names; the contents are checked like those of a remote. Archives are not compressed, so that unpacking
one cannot exhaust the disk.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from blake3 import blake3

from mlcbuild.canon import Entry, canonical
from mlcbuild.errors import MlcbuildError, StoreError, UsageError
from mlcbuild.keyfile import Signer
from mlcbuild.remotes.signing import RefusedError, seal, unseal
from mlcbuild.store.records import LARGEST, Record
from mlcbuild.store.staging import StagingArea
from mlcbuild.store.store import Store

FORMAT = "mlcbuild-archive/1"
_FIRST = "mlcbuild-archive"
_MARK = canonical({"format": FORMAT}) + b"\n"
_BLOCK = 512
_CHUNK = 1 << 20
_SPARSEST = 1000
"""Maximum ratio of the size of a file in an archive to the bytes that the archive occupies on the disk for
it. A higher ratio means that the archive is a sparse file which only claims to hold the bytes; a low ratio is
normal, since `cp --sparse` turns zeros into holes."""
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
    """The numbers of step records, of blobs, and of the blobs' bytes that were written to or read from an
    archive."""

    records: int
    blobs: int
    bytes: int


def write(store: Store, records: Iterable[Record], path: Path, signer: Signer | None = None) -> Moved:
    """Writes an archive of step records and their blobs, and returns the numbers of records, blobs and bytes
    of blobs. The file `path` appears, or is replaced, once the archive is complete, and stays as it is if
    that fails.

    records: a record that occurs twice, as the result of two steps with one key, is written and counted once.
    signer: signs the records; None: they are not signed. Raises StoreError when a record's files are damaged
    or missing, UsageError when something else than a file has that name, MlcbuildError when the archive
    cannot be written.
    """
    if path.exists() and not path.is_file():  # a directory, or a device, which a rename would replace
        raise UsageError(f"{path}: is not a regular file, which an archive replaces: name another one")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    sizes: dict[str, int] = {}
    keys: set[str] = set()
    try:
        with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
            _add(archive, _FIRST, io.BytesIO(_MARK), len(_MARK))
            for record in records:
                if record.key in keys:
                    continue
                keys.add(record.key)
                if lost := store.lost(record):
                    raise StoreError(f"{path} was not written: {lost}")
                for name, digest, size in record.rows:
                    if digest not in sizes:
                        sizes[digest] = size
                        _add_blob(archive, store, Entry(name, digest, size))
                data = seal(record, signer)
                _add(archive, f"ac/{record.key}", io.BytesIO(data), len(data))
        part.replace(path)
    except OSError as error:
        raise MlcbuildError(f"{path}: the archive cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return Moved(len(keys), len(sizes), sum(sizes.values()))


def _add(archive: tarfile.TarFile, name: str, source: io.IOBase | BinaryIO, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    archive.addfile(member, cast(BinaryIO, source))


def _add_blob(archive: tarfile.TarFile, store: Store, entry: Entry) -> None:
    """Adds the file of a blob to an archive. Raises StoreError if the bytes that were written do not match
    the blob's digest, after which the blob is removed from the store; OSError if reading or writing fails."""
    with store.blob(entry.digest).open("rb") as blob:
        source = _Hashed(blob)
        _add(archive, f"cas/{entry.digest}", source, entry.size)
    if source.hasher.hexdigest() != entry.digest:
        raise store.damaged(entry)


class _Hashed(io.RawIOBase):
    """Wraps an open file, and computes the digest of the bytes that are read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self.hasher = blake3()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.hasher.update(data)
        return data


def read(store: Store, path: Path, trust: Iterable[str] = ()) -> Moved:
    """Imports an archive into a store: blobs with the right bytes, and step records that are consistent and
    complete. Returns how many of each were in the archive, whether or not the store had them before.

    trust: public keys; if there are any, one of them must have signed each record. Nothing is written before
    it was checked. Raises UsageError if `path` cannot be read or is no regular file, and at the first invalid
    member; StoreError if the store cannot be written. What was imported before stays.
    """
    trusted = tuple(trust)
    blobs: dict[str, int] = {}
    records = 0
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"{path}: an archive is a regular file: save the stream to a file first")
    with file, store.staging() as staging:
        try:
            for name, size in _members(file):
                kind, _, digest = name.partition("/")
                if name == _FIRST:
                    continue
                if kind == "cas":
                    _take_blob(store, staging, file, digest, size)
                    blobs[digest] = size
                else:
                    _take_record(store, staging, file, digest, size, trusted)
                    records += 1
        except RefusedError as error:
            raise UsageError(f"{path} is refused: {error}") from None
    return Moved(records, len(blobs), sum(blobs.values()))


def _members(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yields name and size in bytes of each member of a tar file, up to the block of zeros that ends the
    archive. `file` is positioned at the member's first byte, or behind the first member, which only states
    the format; the caller need not read the bytes. Raises RefusedError for a damaged archive, and for members
    with other names, too large records and names that occur twice."""
    names: set[str] = set()
    while (header := _read(file, _BLOCK)).strip(b"\0"):
        name, size = _header(header)
        if not names:
            if name != _FIRST or size != len(_MARK) or _read(file, size) != _MARK:
                raise RefusedError(f"it is not an archive of format {FORMAT}")
        elif not re.fullmatch(r"(ac|cas)/[0-9a-f]{64}", name):
            raise RefusedError(f"it holds a member called {name!r}")
        if name in names:
            raise RefusedError(f"it holds {name} twice")
        if name.startswith("ac/") and size > LARGEST:
            raise RefusedError(f"{name} has {size} bytes: more than a record can")
        names.add(name)
        start = file.tell() if name != _FIRST else _BLOCK
        yield name, size
        file.seek(start + -(-size // _BLOCK) * _BLOCK)
    if not names:
        raise RefusedError(f"it is not an archive of format {FORMAT}")
    if len(header) < _BLOCK:
        raise RefusedError("it is cut off")


def _header(header: bytes) -> tuple[str, int]:
    """Returns name and size in bytes from the 512-byte header of a tar member. Raises RefusedError for a
    header that is cut off or has a wrong checksum or size, and for anything but a regular file."""
    if len(header) < _BLOCK:
        raise RefusedError("it is cut off")
    name = header[:100].rstrip(b"\0").decode(errors="replace")
    stated = header[148:156].strip(b" \0")
    sums = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if not re.fullmatch(rb"[0-7]+", stated) or int(stated, 8) != sums:
        raise RefusedError("it is not a tar archive, or it is damaged" if name else "it is not a tar archive")
    kind = header[156:157]
    if kind not in (b"0", b"\0"):
        kind_words = _KINDS.get(kind, f"of the kind {kind.decode(errors='replace')!r}")
        raise RefusedError(f"its member {name!r} is {kind_words}: only regular files are taken")
    field = header[124:136]
    if field[0] == 0x80:  # A size that does not fit into the octal digits is binary.
        return name, int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]+", digits):
        raise RefusedError(f"the size of its member {name!r} is not a number")
    return name, int(digits, 8)


def _take_blob(store: Store, staging: StagingArea, file: BinaryIO, digest: str, size: int) -> None:
    """Copies one blob from an archive into the store. It is hashed before it is written, because an archive
    of a few kB may claim to hold 1 TB of zeros. file: the archive, positioned at the blob's first byte;
    digest, size: those that the archive states. Raises RefusedError if they are wrong, and StoreError if the
    store cannot be written, for example because the disk is full."""
    start, file_size = file.tell(), os.fstat(file.fileno()).st_size
    if size > file_size - start:
        raise RefusedError(f"cas/{digest} says that it has {size} bytes: more than the archive")
    if size > _SPARSEST * (_stored(file.fileno(), start, size) + _BLOCK):
        raise RefusedError(f"cas/{digest} says that it has {size} bytes, which are not in the archive")
    hasher = blake3()
    for data in _pieces(file, size):
        hasher.update(data)
    if hasher.hexdigest() != digest:
        raise RefusedError(f"the bytes of cas/{digest} are wrong")
    with store.writing():
        free = shutil.disk_usage(store.root).free
        if size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = staging.subdirectory() / "blob"
        file.seek(start)
        hasher.reset()
        with part.open("xb") as target:
            for data in _pieces(file, size):
                hasher.update(data)
                target.write(data)
    if hasher.hexdigest() != digest:
        raise RefusedError(f"the bytes of cas/{digest} change while they are read")
    store.put_blob(digest, part, hashed=True)


def _read(file: BinaryIO, size: int) -> bytes:
    """Reads up to `size` bytes of an archive, fewer at its end. Raises RefusedError if that fails: an OSError
    would be taken for one of the store."""
    try:
        return file.read(size)
    except OSError as error:
        raise RefusedError(
            f"it cannot be read: {error.strerror or error}; copy it from its source again"
        ) from None


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0:
        data = _read(file, min(size, _CHUNK))
        if not data:
            raise RefusedError("it is cut off")
        size -= len(data)
        yield data


def _stored(descriptor: int, start: int, size: int) -> int:
    """Returns how many of `size` bytes, from offset `start` on, a file really stores; the others are holes,
    which read as zeros. Returns `size` if the system does not report holes."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    at, end, stored = start, start + size, 0
    while at < end:
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole that extends to the end of the file
                break
            stored = size  # the filesystem does not support SEEK_DATA
            break
        at = os.lseek(descriptor, data, os.SEEK_HOLE)
        stored += max(0, min(at, end) - min(data, end))
    os.lseek(descriptor, before, os.SEEK_SET)
    return stored


def _take_record(
    store: Store, staging: StagingArea, file: BinaryIO, key: str, size: int, trust: tuple[str, ...]
) -> None:
    data = _read(file, size)
    if len(data) < size:
        raise RefusedError("it is cut off")
    try:
        record = unseal(key, data, trust)
    except RefusedError as error:
        raise RefusedError(f"ac/{key}: {error}") from None
    if lost := store.lost(record):
        raise RefusedError(f"ac/{key} comes before its files: {lost}")
    with store.writing():
        part = staging.subdirectory() / "record"
    store.put_record(record, part)
