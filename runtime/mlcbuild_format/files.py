"""Reads files that a stranger may have written: regular files only, no more bytes than fit, and never a wait.

Every function raises BundleError with one sentence.
"""

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
"""Bytes that are hashed at a time, so that Ctrl-C ends a check of large weights."""


def open_regular(path: Path) -> BinaryIO:
    """Returns a regular file, open for reading."""
    try:
        return regular.open_file(path)
    except OSError as error:
        raise read_error(path, error) from None


def read_bytes(path: Path, largest: int) -> bytes:
    """Returns the bytes of a regular file of at most `largest` bytes."""
    try:
        return regular.read(path, largest)
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"{path}: has more than {largest} bytes, which such a file never has"
            raise BundleError(message) from None
        raise read_error(path, error) from None


def read_error(path: Path, error: OSError) -> BundleError:
    """Returns the error for a file of a bundle that the system cannot read."""
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
    """A file that holds one JSON object."""
    try:
        document = parse_json(read_bytes(path, largest))
    except ValueError as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BundleError(f"{path}: must hold a JSON object")
    return document


def digest(path: Path) -> str:
    """The BLAKE3 of a file, at about 2 GB per CPU-second."""
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
    """Checks that below `root` there are no files but `names`, which are relative paths, and no links.

    Directories in which no such file lies are refused without a look into them, so that the walk is as short
    as the list of names is.
    """
    folders = {parent for name in names for parent in _parents(name)}
    for name, kind in _entries(root, folders):
        if name in folders and kind == stat.S_IFDIR:
            continue
        if kind == stat.S_IFLNK:
            raise BundleError(f"{root / name}: is a symbolic link: copy what it points to in its place")
        if name not in names:
            what = "directory" if kind == stat.S_IFDIR else "file"
            raise BundleError(
                f"{root / name}: the manifest does not list this {what}, and a bundle is exactly its"
                " manifest: remove it, or copy the bundle again"
            )
        if kind != stat.S_IFREG:
            raise BundleError(f"{root / name}: not a regular file; copy the bundle again")


def _entries(root: Path, folders: Collection[str]) -> Iterator[tuple[str, int]]:
    """(relative path, file type) of everything in `root` and in the `folders` below it."""
    for folder in ("", *sorted(folders)):
        place = root / folder
        try:
            if folder and not stat.S_ISDIR(place.lstat().st_mode):
                continue  # it was an entry of its parent, or something that is missing
            with os.scandir(place) as found:
                for entry in sorted(found, key=lambda entry: entry.name):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    yield f"{folder}/{entry.name}" if folder else entry.name, stat.S_IFMT(mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BundleError(f"{place}: cannot be read: {error.strerror}") from None


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
