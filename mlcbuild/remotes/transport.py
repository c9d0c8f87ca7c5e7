"""What every protocol offers: named sequences of bytes, read from any offset, and put whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol

CHUNK = 1 << 17
"""Bytes in memory at a time. More is slower: the allocator maps larger pieces anew each time."""


class CancelledError(Exception):
    """A transfer was ended because the run ends."""


@dataclass(frozen=True)
class Body:
    """The bytes of one name, from `start` on. A context manager."""

    start: int
    """Where it begins: what was asked for, or 0 when the other side cannot begin in the middle."""
    read: Callable[[], bytes]
    """The next bytes, as many as are there, at most CHUNK; b"" at the end. Raises RemoteError."""
    close: Callable[[], None]

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport(Protocol):
    """One remote. Methods may be called from several threads, and raise RemoteError when it fails."""

    def open(self, name: str, start: int = 0) -> Body | None:
        """The bytes of `ac/<key>` or `cas/<digest>`; None when there is no such name."""

    def size(self, name: str) -> int | None:
        """How many bytes it has; None when there is no such name."""

    def put(self, name: str, source: BinaryIO, size: int) -> None:
        """Makes the name stand for `size` bytes of `source`; readers see all of them or nothing new."""

    def close(self) -> None:
        """Ends what is kept open, also under threads that still use it."""
