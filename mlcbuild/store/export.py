"""Writes the files of an artifact (the result of a step) to an output directory that the user named, and
replaces an older one there if all of its files are mlcbuild's."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mlcbuild_format import regular

from mlcbuild.canon import bytes_digest, canonical, file_digest
from mlcbuild.errors import LostBlobError, MlcbuildError, UsageError
from mlcbuild.store.links import stamp
from mlcbuild.store.locks import wait_lock
from mlcbuild.store.record_form import Row
from mlcbuild.store.records import LARGEST, Record
from mlcbuild.store.staging import remove
from mlcbuild.store.stamp import SPOILT, STAMP_NS
from mlcbuild.store.store import Store

_SHOWN = 3


@dataclass(frozen=True)
class _Listing:
    """The files that mlcbuild wrote to an output directory, as the list beside it states them."""

    rows: Sequence[Row] = ()
    """(path in the output directory, digest, size in bytes) of each file that mlcbuild wrote there."""
    inodes: Mapping[str, int] = field(default_factory=dict)
    """Path of a file in the output directory -> its inode number when mlcbuild wrote it. By it, two files of
    the same size that were exchanged are noticed, since mlcbuild gives all of its files the same mtime."""


def materialise(
    store: Store, record: Record, destination: Path, texts: Mapping[str, bytes] = MappingProxyType({})
) -> bool:
    """Makes `destination` a directory with exactly the files of a step's result, which its record in the
    store lists, and the files `texts` (path -> bytes).

    Returns False if it already was. The record's files become read-only hard links to blobs, or clones or
    copies on another filesystem, and every byte is checked. The store may be read-only. The directory
    appears, or replaces an older one, by rename. An older one is replaced only if mlcbuild wrote each file in
    it: `.NAME.mlcbuild.json` beside it lists them with digests, and files that are not listed or have changed
    belong to the user. A file that was exchanged for another one of the same size and mtime is written again.
    Raises UsageError for files of the user and for a link or file at `destination`, StoreError when the store
    is damaged, MlcbuildError when the destination cannot be written.
    """
    destination = destination.absolute()
    added = ((path, bytes_digest(data), len(data)) for path, data in texts.items())
    rows = sorted([*record.rows, *added])
    if _stands(rows, destination):
        return False
    if lost := store.lost(record):
        raise LostBlobError(f"{destination} cannot be written: {lost}; run again to build it anew")
    try:
        _make_directory(destination.parent)
        with wait_lock(_marker(destination).with_suffix(".lock")):
            return _replace(store, destination, rows, lambda new: _fill(new, store, record, texts))
    except OSError as error:
        raise MlcbuildError(f"{destination} cannot be written: {error.strerror or error}") from error


def set_aside(destination: Path) -> Path | None:
    """Renames an output directory that mlcbuild wrote from NAME to .NAME.refused, which hides it and replaces
    an older one of that name, and returns the new path: so nobody ships an old bundle whose successor
    verification has refused.

    Returns None if there is no such directory, if it holds files of the user, or if it cannot be renamed.
    """
    destination = destination.absolute()
    marker = _marker(destination)
    place = destination.with_name(f".{destination.name}.refused")
    try:
        if not destination.is_dir():
            return None
        with wait_lock(marker.with_suffix(".lock")):
            _check_ours(destination, _read(marker).rows)
            remove(place)
            destination.rename(place)
    except (OSError, UsageError):
        return None
    return place


def _stands(rows: list[Row], destination: Path) -> bool:
    """Returns True if an output directory already holds exactly the files `rows`, (path, digest, size) each,
    with the mtime of files from the store and the inodes that mlcbuild noted. Nothing is hashed, and no lock
    is held, since most of thousands of outputs are complete.

    While another process replaces the directory, the result is False: mlcbuild's list of the directory's
    files, which is read first, then lists other files or is absent.
    """
    sizes = {path: size for path, _, size in rows}
    directories = {path[: at + 1] for path in sizes for at, letter in enumerate(path) if letter == "/"}
    file_count, left = 0, [""]
    try:
        listing = _read(_marker(destination))
        if listing.rows != rows or destination.is_symlink():
            return False
        while left:
            below = left.pop()
            with os.scandir(f"{destination}/{below}") as scanned:
                entries = list(scanned)
            for entry in entries:
                name = below + entry.name
                if f"{name}/" in directories and entry.is_dir(follow_symlinks=False):
                    left.append(f"{name}/")
                    continue
                stat_result = entry.stat(follow_symlinks=False)
                if sizes.get(name) != stat_result.st_size or stat_result.st_mtime_ns != STAMP_NS:
                    return False
                if not stat.S_ISREG(stat_result.st_mode) or listing.inodes.get(name) != stat_result.st_ino:
                    return False
                file_count += 1
    except OSError:
        return False
    return file_count == len(sizes)


def _marker(destination: Path) -> Path:
    """Returns the path of the file .NAME.mlcbuild.json, beside the output directory `destination` of that
    NAME, that lists the files that mlcbuild wrote to it."""
    return destination.with_name(f".{destination.name}.mlcbuild.json")


def _make_directory(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _fill(new: Path, store: Store, record: Record, texts: Mapping[str, bytes]) -> None:
    new.mkdir()
    store.link_out(record.files, new)
    for path, data in texts.items():
        (new / path).write_bytes(data)
        stamp(new / path)


def _replace(store: Store, destination: Path, rows: list[Row], fill: Callable[[Path], None]) -> bool:
    marker = _marker(destination)
    new, old = marker.with_suffix(".new"), marker.with_suffix(".old")
    listing = _read(marker)
    _check_ours(destination, listing.rows)
    if _holds(store, destination, rows, listing):
        _write(marker, rows, destination)
        return False
    remove(new)
    remove(old)  # left by a killed run; it holds only files of mlcbuild
    try:
        fill(new)
        _write(marker, [*listing.rows, *rows], None)  # It covers both states that a crash may leave.
        if destination.exists():
            destination.rename(old)
        new.rename(destination)
    except BaseException:
        remove(new)  # Otherwise it would keep a full disk full.
        if old.exists() and not destination.exists():
            old.rename(destination)
        raise
    _write(marker, rows, destination)
    remove(old)
    return True


def _holds(store: Store, destination: Path, rows: list[Row], listing: _Listing) -> bool:
    """Returns True if the output directory `destination` holds exactly the files `rows`, (path, digest, size)
    each, and they are unchanged: each is also in `listing`, the files that mlcbuild wrote there before, and
    has this size and the mtime that mlcbuild gives to its files. A file is hashed only if its inode is
    neither the listed one nor that of its blob in the store."""
    present_files = {name: path for path, name in _files(destination)}
    return present_files.keys() == {path for path, _, _ in rows} and all(
        row in listing.rows and _is_whole(store, present_files[row[0]], row, listing) for row in rows
    )


def _is_whole(store: Store, path: Path, row: Row, listing: _Listing) -> bool:
    name, digest, size = row
    stat_result = path.stat()
    if (stat_result.st_size, stat_result.st_mtime_ns) != (size, STAMP_NS):
        return False
    blob = store.blob(digest)
    is_known = listing.inodes.get(name) == stat_result.st_ino or (blob.exists() and path.samefile(blob))
    return is_known or file_digest(path) == digest


def _check_ours(destination: Path, listed: Sequence[Row]) -> None:
    """Raises UsageError if an output directory holds a file, link or empty directory that mlcbuild did not
    write, or a file that was changed since, or if a link or a file is in its place. listed: (path, digest,
    size) of each file that mlcbuild wrote there."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(f"{destination} is not a directory: move it away, or choose another output")
    foreign = [name for path, name in _files(destination) if not _is_ours(path, name, listed)]
    if foreign:
        shown = ", ".join(foreign[:_SHOWN]) + (
            f" and {len(foreign) - _SHOWN} more" if foreign[_SHOWN:] else ""
        )
        raise UsageError(
            f"{destination} holds files that were not written by mlcbuild, or were changed since: {shown}; "
            "move them away, or choose another output"
        )


def _is_ours(path: Path, name: str, listed: Sequence[Row]) -> bool:
    rows = [row for row in listed if row[0] == name]
    if not rows or path.is_symlink() or not path.is_file():
        return False
    stat_result = path.stat()
    sized = [row for row in rows if row[2] == stat_result.st_size]
    if stat_result.st_mtime_ns == SPOILT * 10**9:  # a link of a damaged blob, whatever its size
        return True
    if stat_result.st_mtime_ns == STAMP_NS:
        return bool(sized)
    return bool(sized) and file_digest(path) in {row[1] for row in sized}


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields (path, path relative to `root`) of each file, link and empty directory below `root`, in a fixed
    order."""
    for directory, names, files in os.walk(root):
        names.sort()
        place = Path(directory)
        links = [name for name in names if (place / name).is_symlink()]
        for name in sorted([*files, *links]):
            yield place / name, (place / name).relative_to(root).as_posix()
        if not names and not files and place != root:
            yield place, place.relative_to(root).as_posix()


def _read(marker: Path) -> _Listing:
    """Reads the list of files that mlcbuild wrote to an output directory; returns an empty one if it is
    missing or damaged, and no inodes if an earlier version of mlcbuild wrote it.
    """
    try:
        document = json.loads(regular.read(marker, LARGEST, follow_link=False))
        rows = [(str(path), str(digest), int(size)) for path, digest, size in document["files"]]
        return _Listing(rows, {str(path): int(inode) for path, inode in document.get("inodes", {}).items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return _Listing()


def _write(marker: Path, rows: Sequence[Row], directory: Path | None) -> None:
    """Writes the list of the files `rows`, (path, digest, size) each, that mlcbuild wrote to an output
    directory to the path `marker`, with the files' inodes in `directory`; without inodes if that is None, as
    while the directory is being replaced. Raises OSError if it cannot be written."""
    part = marker.with_suffix(".part")
    remove(part)
    inodes = {} if directory is None else {path: (directory / path).stat().st_ino for path, _, _ in rows}
    document = {"files": [list(row) for row in rows], "format": "export/1", "inodes": inodes}
    try:
        part.write_bytes(canonical(document) + b"\n")
        part.replace(marker)
    except OSError:
        remove(part)
        raise
