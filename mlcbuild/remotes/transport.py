"""The interface of all protocols: named byte sequences, which are read from any offset and written as a
whole.

A remote cache that hangs or sends invalid data can delay a run, but not end it. Each transport limits the
time until bytes arrive, and `Pace` the time that they take; `border` turns every exception that a malformed
response may cause into one RemoteError, so that no parser must foresee every attack.
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
"""Number of bytes of a transfer that are in memory at a time. With an eighth of it, a download takes a third
more CPU time (`ci/bench/remotes --set mlcbuild.remotes.transport.CHUNK=131072`).
"""
CONNECT = 10.0
"""Maximum seconds for connecting to a server."""
TIMEOUT = 30.0
"""Maximum seconds for which a remote cache may send nothing: before the headers of a response, and at each
read of its body. Also the period over which the rate of a transfer is measured."""
SLOWEST = 16_384
"""Minimum rate of a transfer in bytes per second, measured over TIMEOUT seconds; a slower one fails."""
PAUSES = (0.2, 1.0)
"""Seconds to wait before the first and before the second retry of a request, which is the last."""

_ATTEMPTS = 3
"""Number of consecutive interrupted requests below the rate SLOWEST after which a download fails."""


class SlowError(RemoteError):
    """The error for a transfer that is too slow, or a remote cache that does not answer in time. A retry
    would not be faster."""


class DamagedError(ValueError):
    """The error for an object on a remote cache whose contents are wrong or cannot be read. The message is
    the end of a sentence, such as "it is not a regular file"."""


class CancelledError(Exception):
    """The error for a transfer that was stopped because the run ends."""


@dataclass(frozen=True)
class Body:
    """The bytes of one object on a remote cache, from `start` on. Used as a context manager, this stream
    closes the connection or makes it reusable.
    """

    start: int
    """Offset, within the object, of the first byte that `read` returns; 0 if the remote cache ignored the
    range."""
    read: Callable[[], Buffer]
    """Function without parameters that returns the next bytes of the object, b"" at the end. The next call
    may overwrite the returned buffer. Raises RemoteError if the transfer fails or is too slow."""
    close: Callable[[], None]

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pace:
    """Measures the rate of a transfer in windows of `timeout` seconds. Its `add` raises SlowError if, at the
    end of a window, too few bytes were transferred. slowest: minimum rate in bytes per second."""

    def __init__(self, timeout: float, slowest: float = SLOWEST) -> None:
        self._timeout = timeout
        self._slowest = slowest
        self._since = time.monotonic()
        self._count = 0

    def add(self, count: int) -> None:
        """Adds `count` transferred bytes to those of the current time window. Raises SlowError if the window
        has ended and its bytes are fewer than the minimum rate requires."""
        self._count += count
        elapsed = time.monotonic() - self._since
        if elapsed <= self._timeout:
            return
        if self.is_slow():
            raise SlowError(f"it is too slow: {self._count} bytes in {elapsed:.0f} seconds")
        self._since, self._count = time.monotonic(), 0

    def is_slow(self) -> bool:
        """Returns True if the rate of the transfer since the current time window began is below the minimum;
        the window need not have ended."""
        return self._count < self._slowest * (time.monotonic() - self._since)


class Attempts:
    """Counts the interrupted requests for one remote object; `failed` raises the error of a request if it is
    a SlowError, or once three in a row have brought too few bytes."""

    def __init__(self) -> None:
        self._vain = 0

    def failed(self, error: RemoteError, count: int, began: float) -> None:
        """Records that a request failed with `error`, after it began at `began` (time.monotonic()) and
        brought `count` new bytes of a download.

        Raises `error` if it is a SlowError, or if this is the third request in a row that brought no byte or
        fewer than the minimum rate requires (SLOWEST, in bytes per second). Otherwise the caller may send
        another one. Thus a server that breaks off after each byte does not get one request per byte.
        """
        enough = max(1, SLOWEST * min(time.monotonic() - began, TIMEOUT))
        self._vain = 0 if count >= enough else self._vain + 1
        if isinstance(error, SlowError) or self._vain == _ATTEMPTS:
            raise error


@contextmanager
def border() -> Iterator[None]:
    """Returns a context in which every `Exception` becomes a RemoteError, except those that a transport may
    raise: MlcbuildError (of which RemoteError is one), DamagedError and CancelledError.

    Whatever the data of a remote cache makes this code or a library raise is the remote's fault and must not
    end a run. The message has the system's reason for an OSError, and names only the kind of any other
    exception, whose text may quote the remote.
    """
    try:
        yield
    except (MlcbuildError, DamagedError, CancelledError):
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise RemoteError(f"{place}{error.strerror or type(error).__name__}") from error
    except Exception as error:
        raise RemoteError(f"its answer cannot be parsed ({type(error).__name__})") from error


def whole_number(text: str) -> int | None:
    """Parses the size or offset in an HTTP header; returns None for anything but 1 to 18 ASCII digits."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def quoted(text: str) -> str:
    """Returns the first 60 characters of a text from a remote cache in quotes, with "..." if it is longer,
    and with all but printable ASCII characters escaped, so that messages may show it."""
    return ascii(text if len(text) <= 60 else f"{text[:60]}...")


class Transport(Protocol):
    """A connection to one remote cache, which stores objects by name. Its methods are thread-safe and raise
    RemoteError on failure; those that read may also raise DamagedError. The wrapper `Bordered` turns other
    exceptions of an implementation into RemoteError."""

    def open(self, name: str, start: int = 0) -> Body | None:
        """Opens the object `name`, which is "ac/<key>" or "cas/<digest>", and returns a stream of its bytes
        from `start` on, or from 0 if the remote cache ignores the offset (see `Body.start`); None if the
        remote does not have the object. Raises RemoteError on failure, and DamagedError if what is stored
        under the name is no readable object."""

    def size(self, name: str) -> int | None:
        """Returns the size in bytes of the object `name`, such as "cas/<digest>"; None if the remote cache
        does not have it or does not state the size. Raises RemoteError on failure, and DamagedError if what
        is stored under the name is no readable object."""

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        """Stores the `size` bytes of the stream `source`, which must be seekable and at its beginning, in the
        remote cache as the object `name`, such as "cas/<digest>". Readers see either the whole object or no
        change.

        new: True if the caller has seen that no object of this name exists; one that another machine has
        written since then may stay instead of this one. Raises RemoteError on failure.
        """

    def close(self) -> None:
        """Closes all connections to the remote cache, even those that other threads are using, whose
        transfers then fail with RemoteError. The object cannot be used afterwards."""


class Bordered:
    """Wraps the connection to a remote cache (a Transport) so that every exception that a malformed response
    may cause becomes a RemoteError: see `border`."""

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
