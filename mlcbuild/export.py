"""Writes an artifact to a place the user named."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from mlcbuild.canon import bytes_digest, canonical, file_digest
from mlcbuild.errors import MlcbuildError, StoreError, UsageError
from mlcbuild.links import STAMP
from mlcbuild.locks import wait_lock
from mlcbuild.records import Record
from mlcbuild.staging import remove_tree
from mlcbuild.store import Store

Row: TypeAlias = tuple[str, str, int]
_SHOWN = 3


def materialise(store: Store, record: Record, destination: Path) -> bool:
    """Makes `destination` a directory with exactly the record's files; False when it was so already.

    The files are read-only hard links to the store's blobs, or clones or copies on another filesystem.
    The directory appears, or replaces an older one, by rename. An older one is replaced only when each
    file in it is one that was written here: `.NAME.mlcbuild.json` beside it lists those with digests, and
    a file that is not in the list, or was changed, is the user's. Raises UsageError then, StoreError when
    the store's files are not intact, MlcbuildError when the destination cannot be written.
    """
    destination = destination.absolute()
    if _stands(record, destination):
        return False
    if lost := store.lost(record):
        raise StoreError(f"{destination} cannot be written: {lost}; run again to build it anew")
    name = bytes_digest(b"export\0" + os.fsencode(destination))
    with store.writing():
        # A copy of a store may lack its empty directories.
        (store.root / "locks").mkdir(exist_ok=True)
        lock = wait_lock(store.root / "locks" / name)
    with lock:
        try:
            return _replace(store, record, destination)
        except OSError as error:
            raise MlcbuildError(f"{destination} cannot be written: {error.strerror or error}") from error


def _stands(record: Record, destination: Path) -> bool:
    """Whether there is nothing to do, seen without a lock: thousands of outputs are mostly as they were.

    What another process is about to replace has a list that names more, or none.
    """
    sizes = {path: size for path, _, size in record.rows}
    directories = {path[: at + 1] for path in sizes for at, letter in enumerate(path) if letter == "/"}
    found, left = 0, [""]
    try:
        known = json.loads(_marker(destination).read_bytes())["files"]
        if known != [list(row) for row in record.rows] or destination.is_symlink():
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
                seen = entry.stat(follow_symlinks=False)
                if sizes.get(name) != seen.st_size or seen.st_mtime_ns != STAMP * 10**9:
                    return False
                if not stat.S_ISREG(seen.st_mode):
                    return False
                found += 1
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == len(sizes)


def _marker(destination: Path) -> Path:
    """The file beside an output that lists what was written there."""
    return destination.with_name(f".{destination.name}.mlcbuild.json")


def _replace(store: Store, record: Record, destination: Path) -> bool:
    known = _marker(destination)
    new, old = known.with_suffix(".new"), known.with_suffix(".old")
    listed = _read(known)
    _check_ours(destination, listed)
    if _holds(destination, record, listed):
        return False
    remove_tree(new)
    remove_tree(old)  # left by a run that was killed here; its files were ours
    new.mkdir(parents=True)
    store.link_out(record.files, new)
    _write(known, [*listed, *record.rows])  # whichever of both a crash leaves is known as ours
    if destination.exists():
        destination.rename(old)
    new.rename(destination)
    _write(known, list(record.rows))
    remove_tree(old)
    return True


def _holds(destination: Path, record: Record, listed: list[Row]) -> bool:
    """What is here was checked against the list already, so that names, sizes and mtimes say enough."""
    here = {name: path.stat() for path, name in _files(destination)}
    return here.keys() == {path for path, _, _ in record.rows} and all(
        row in listed and here[row[0]].st_size == row[2] and here[row[0]].st_mtime_ns == STAMP * 10**9
        for row in record.rows
    )


def _check_ours(destination: Path, listed: list[Row]) -> None:
    """Raises UsageError when the destination holds anything that was not written here."""
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


def _is_ours(path: Path, name: str, listed: list[Row]) -> bool:
    rows = [row for row in listed if row[0] == name]
    if not rows or path.is_symlink() or not path.is_file():
        return False
    found = path.stat()
    sized = [row for row in rows if row[2] == found.st_size]
    if found.st_mtime_ns == STAMP * 10**9:
        return bool(sized)
    return bool(sized) and file_digest(path) in {row[1] for row in sized}


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Everything below `root` but directories that hold something, with relative names, sorted."""
    for directory, names, files in os.walk(root):
        names.sort()
        place = Path(directory)
        links = [name for name in names if (place / name).is_symlink()]
        for name in sorted([*files, *links]):
            yield place / name, (place / name).relative_to(root).as_posix()
        if not names and not files and place != root:
            yield place, place.relative_to(root).as_posix()


def _read(known: Path) -> list[Row]:
    try:
        return [
            (str(path), str(digest), int(size))
            for path, digest, size in json.loads(known.read_bytes())["files"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write(known: Path, rows: list[Row]) -> None:
    part = known.with_suffix(".part")
    part.write_bytes(canonical({"files": [list(row) for row in rows], "format": "export/1"}) + b"\n")
    part.replace(known)
