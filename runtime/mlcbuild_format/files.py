"""Reads untrusted files of a bundle: regular files only, up to a size limit, without blocking. Every function
that reads raises BundleError for a file that breaks these rules."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from mlcbuild_format import regular
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import Json, parse_json

_CHUNK = 1 << 20
"""Number of bytes of a file that are hashed at a time, few enough that Ctrl-C interrupts the check of large
weights at once."""


def open_regular(path: Path) -> BinaryIO:
    """Opens the file at `path`, or the target of a link, for reading and returns it. Raises BundleError if it
    is missing, unreadable or not a regular file, such as a pipe."""
    try:
        return regular.open_file(path)
    except OSError as error:
        raise read_error(path, error) from None


def read_bytes(path: Path, largest: int) -> bytes:
    """Returns the bytes of the regular file at `path`, or of a link's target. Raises BundleError if it has
    more than `largest` bytes, or is missing, unreadable or not a regular file."""
    try:
        return regular.read(path, largest)
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"{path}: has more than {largest} bytes, which such a file never has"
            raise BundleError(message) from None
        raise read_error(path, error) from None


def read_error(path: Path, error: OSError) -> BundleError:
    """Returns a BundleError with the reason why the system cannot read a file of a bundle. error: the
    system's exception.
    """
    if error.errno == errno.ENOENT:
        return BundleError(f"{path}: missing; copy the bundle again")
    if error.errno == errno.EINVAL:
        return BundleError(f"{path}: not a regular file; copy the bundle again")
    return BundleError(f"{path}: cannot be read: {error.strerror}")


def read_text(path: Path, largest: int) -> str:
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_json(path: Path, largest: int) -> dict[str, Json]:
    """Returns the JSON object in a file of a bundle. Raises BundleError for a file of more than `largest`
    bytes or one that cannot be read, and for other content (also what `parse_json` refuses)."""
    try:
        document = parse_json(read_bytes(path, largest))
    except ValueError as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BundleError(f"{path}: must hold a JSON object")
    return document


def digest(path: Path) -> str:
    """Returns the BLAKE3 hash of a file, or of a link's target, as 64 lower-case hex digits, at about 2 GB
    per CPU-second. Raises BundleError if the file cannot be read or is no regular file."""
    hasher = blake3()
    with open_regular(path) as file:
        chunk = memoryview(bytearray(min(_CHUNK, os.fstat(file.fileno()).st_size) + 1))
        try:
            while size := file.readinto(chunk):  # type: ignore[attr-defined]  # a buffered reader has it
                hasher.update(chunk[:size])
        except OSError as error:
            raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    return str(hasher.hexdigest())


def check_listing(root: Path, names: Collection[str]) -> None:
    """Raises BundleError for anything below `root` but the regular files `names` and the directories that
    hold them: for another file or directory, a symbolic link, a pipe and so on, and for a directory that
    cannot be read. Files of `names` that are missing are not reported.

    `names` are relative paths. A directory that holds none of them is refused without being listed, however
    many files it has.
    """
    folders = {parent for name in names for parent in _parents(name)}
    for name, kind in _entries(root, folders):
        if name in folders and kind == stat.S_IFDIR:
            continue
        if kind == stat.S_IFLNK:
            raise BundleError(f"{root / name}: is a symbolic link: copy what it points to in its place")
        if name not in names:
            entry_kind = "directory" if kind == stat.S_IFDIR else "file"
            raise BundleError(
                f"{root / name}: the manifest does not list this {entry_kind}, and a bundle is exactly its"
                " manifest: remove it, or copy the bundle again"
            )
        if kind != stat.S_IFREG:
            raise BundleError(f"{root / name}: not a regular file; copy the bundle again")


def _entries(root: Path, folders: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yields (path relative to `root`, file type as stat.S_IFMT returns it) of each entry directly in the
    directory `root`, then of each directly in those directories below it whose relative paths are `folders`.
    Links are not followed: their type is S_IFLNK. Entries of one directory are sorted by name; a directory
    that is missing, or is none, is skipped. Raises BundleError for a directory that cannot be read."""
    for folder in ("", *sorted(folders)):
        place = root / folder
        try:
            if folder and not stat.S_ISDIR(place.lstat().st_mode):
                continue  # The listing of its parent has reported it, or it is missing.
            with os.scandir(place) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    yield f"{folder}/{entry.name}" if folder else entry.name, stat.S_IFMT(mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BundleError(f"{place}: cannot be read: {error.strerror}") from None


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
