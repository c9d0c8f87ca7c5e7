"""A directory that several machines see, as over NFS.

    ac/<key>  cas/<digest>  tmp/<random>

Relies on nothing but a rename within the directory: no locks, no hard links, no synchronous clocks. The
names are those of the HTTP protocol, so that a web server can offer the same directory.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.transport import CHUNK, Body

_ABANDONED = 86_400
"""Seconds after which a part that nobody finished is removed."""


class Directory:
    """A transport. The directory must exist: an empty mount point must not be taken for the cache."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._swept = False

    def open(self, name: str, start: int = 0) -> Body | None:
        self._check()
        try:
            # Closed by the body.
            file = (self._root / name).open("rb", buffering=0)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._explain(error, "read") from None

        def read() -> bytes:
            try:
                return file.read(CHUNK)
            except OSError as error:  # also a file that the server replaced meanwhile
                raise self._explain(error, "read") from None

        file.seek(start)
        return Body(start, read, file.close)

    def size(self, name: str) -> int | None:
        self._check()
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._explain(error, "read") from None

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        self._check()
        part = self._root / "tmp" / secrets.token_hex(16)
        try:
            for directory in (part.parent, (self._root / name).parent):
                directory.mkdir(exist_ok=True)
            _write(part, source, size)
            self._sweep(part)
            part.replace(self._root / name)
        except OSError as error:
            raise self._explain(error, "written") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def close(self) -> None:
        return

    def _check(self) -> None:
        if not self._root.is_dir():
            raise RemoteError(f"there is no directory {self._root}: create it, or mount it")

    def _sweep(self, part: Path) -> None:
        """Removes, once, what killed processes left; ages are by the file server's own clock."""
        if self._swept:
            return
        self._swept = True
        now = part.stat().st_mtime
        for path in part.parent.iterdir():
            with suppress(OSError):
                if now - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    @staticmethod
    def _explain(error: OSError, what: str) -> RemoteError:
        return RemoteError(f"it cannot be {what}: {error.strerror or error}")


def _write(part: Path, source: BinaryIO, size: int) -> None:
    left = size
    with part.open("xb") as file:
        while left and (data := source.read(min(left, CHUNK))):
            file.write(data)
            left -= len(data)
        file.flush()
        os.fsync(file.fileno())  # on NFS it is here that a full disk shows
    if left:
        raise OSError(f"{left} of {size} bytes to send are missing")
    part.chmod(0o444)
