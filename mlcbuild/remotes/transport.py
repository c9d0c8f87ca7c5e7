"""What every protocol offers: named sequences of bytes, read from any offset, and put whole.

A remote can slow a run by its timeout, and can do nothing else. Each transport bounds the time until bytes
come, and `Pace` the time that they take; `border` turns everything that a malformed answer may raise into
one RemoteError, so that no parser needs to foresee every lie.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol, TypeAlias

from mlcbuild.errors import MlcbuildError, RemoteError

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

_ATTEMPTS = 3
"""Requests in a row that bring too little."""


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


class Pace:
    """Measures a transfer in windows of `timeout` seconds, and gives up one that comes drop by drop."""

    def __init__(self, timeout: float, slowest: float = SLOWEST) -> None:
        self._timeout = timeout
        self._slowest = slowest
        self._since = time.monotonic()
        self._count = 0

    def add(self, count: int) -> None:
        """Counts bytes that came or went. Raises SlowError after a window with too few."""
        self._count += count
        elapsed = time.monotonic() - self._since
        if elapsed <= self._timeout:
            return
        if self.is_slow():
            raise SlowError(f"it is too slow: {self._count} bytes in {elapsed:.0f} seconds")
        self._since, self._count = time.monotonic(), 0

    def is_slow(self) -> bool:
        """Returns whether the current window has had fewer bytes than it should by now."""
        return self._count < self._slowest * (time.monotonic() - self._since)


class Attempts:
    """Counts requests for parts of one thing that break off, and ends them when they bring too little."""

    def __init__(self) -> None:
        self._vain = 0

    def failed(self, error: RemoteError, count: int, began: float) -> None:
        """Notes a request that began at `began` (time.monotonic()) and brought `count` bytes more.

        Raises its error after a slow transfer, or when three in a row came slower than SLOWEST: a server
        that breaks off after each byte must not be asked once for each byte.
        """
        enough = max(1, SLOWEST * min(time.monotonic() - began, TIMEOUT))
        self._vain = 0 if count >= enough else self._vain + 1
        if isinstance(error, SlowError) or self._vain == _ATTEMPTS:
            raise error


@contextmanager
def border() -> Iterator[None]:
    """Turns every exception but those that a transport may raise into a RemoteError.

    Whatever a remote makes our code or a library raise is the remote's fault, and must not end a run. The
    message names the kind of exception only: its text may quote what the remote sent.
    """
    try:
        yield
    except (MlcbuildError, DamagedError, CancelledError):
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise RemoteError(f"{place}{error.strerror or type(error).__name__}") from error
    except Exception as error:
        raise RemoteError(f"its answer cannot be understood ({type(error).__name__})") from error


def whole_number(text: str) -> int | None:
    """Returns a size or offset as a header states it; None for anything but 1 to 18 ASCII digits."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def quoted(text: str) -> str:
    """Returns text of a remote as a message may show it: short, ASCII, without control characters."""
    return ascii(text if len(text) <= 60 else f"{text[:60]}...")


class Transport(Protocol):
    """One remote. Methods may be called from several threads, and raise RemoteError when it fails.

    Those that read may raise DamagedError, too. `Bordered` holds a transport to that.
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


class Bordered:
    """A transport behind `border`."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def open(self, name: str, start: int = 0) -> Body | None:
        with border():
            body = self._inner.open(name, start)
        if body is None:
            return None
        inner = body

        def read() -> Buffer:
            with border():
                return inner.read()

        return Body(body.start, read, body.close)

    def size(self, name: str) -> int | None:
        with border():
            return self._inner.size(name)

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        with border():
            self._inner.put(name, source, size, new=new)

    def close(self) -> None:
        self._inner.close()
