"""What every protocol offers: named sequences of bytes, read from any offset, and put whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol, TypeAlias

from mlcbuild.errors import RemoteError

Buffer: TypeAlias = bytes | bytearray | memoryview
CHUNK = 1 << 20
"""Bytes in memory at a time: at an eighth of it, a download takes a third more CPU time."""
CONNECT = 10.0
"""Seconds to reach a server."""
TIMEOUT = 30.0
"""Seconds without any answer."""
SLOWEST = 16_384
"""Bytes per second: a transfer that is slower, over TIMEOUT seconds or more, is given up."""
PAUSES = (0.2, 1.0)
"""Seconds before a request is tried again."""


class SlowError(RemoteError):
    """A transfer is so slow that it is given up: to ask again would only bring more of the same."""


class DamagedError(ValueError):
    """What a remote has under a name is not what the name says. The message is the end of a sentence."""


class CancelledError(Exception):
    """A transfer was ended because the run ends."""


@dataclass(frozen=True)
class Body:
    """The bytes of one name, from `start` on. A context manager."""

    start: int
    """Where it begins: what was asked for, or 0 when the other side cannot begin in the middle."""
    read: Callable[[], Buffer]
    """The next bytes, as many as are there; none at the end. The buffer is filled anew by the next call.

    Raises RemoteError.
    """
    close: Callable[[], None]

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport(Protocol):
    """One remote. Methods may be called from several threads, and raise RemoteError when it fails.

    Those that read may raise DamagedError, too.
    """

    def open(self, name: str, start: int = 0) -> Body | None:
        """The bytes of `ac/<key>` or `cas/<digest>`; None when there is no such name."""

    def size(self, name: str) -> int | None:
        """How many bytes it has; None when there is no such name."""

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        """Makes the name stand for `size` bytes of `source`; readers see all of them or nothing new.

        `new`: there was no such name; if there is one now, what it stands for may stay.
        """

    def close(self) -> None:
        """Ends what is kept open, also under threads that still use it."""
