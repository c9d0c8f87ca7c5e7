"""Reads an object of a remote cache in ranges of its bytes, over as many connections as make it faster.

Some servers limit the rate of each connection, others give all their bandwidth to one connection. With the
latter, several connections cost the server and the local processors a fifth more.

`ci/bench/remotes --set mlcbuild.remotes.ranges.AHEAD=3` measures downloads with another value of a constant.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError as EndedError
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.transport import Body, Buffer

FIRST = 8 << 20
"""Number of bytes in the first range that is requested of a remote object. Its transfer measures the speed of
the server."""
FAST = 200_000_000
"""Download rate in bytes per second above which an object is read over one connection only."""
GROWTH = 8
"""Ratio of the number of bytes in one requested range of a remote object to that in the range before it,
while one fast connection transfers the object."""
PIECE = 4 << 20
"""Number of bytes in each range when several ranges of a remote object are requested at the same time."""
AHEAD = 6
"""Maximum number of ranges of a remote object that are requested at the same time. Memory holds at most this
many ranges, and one more while its bytes are used."""


@dataclass(frozen=True)
class Range:
    """The response of a remote cache to a request for a range of an object's bytes: exactly that range, or
    the whole object."""

    body: Body
    size: int
    """Size in bytes of the whole remote object, of which a range was requested; 0 if the server sent the
    whole object instead."""
    version: str
    """The ETag of the object, which identifies its version. "" if the server sends none or a weak one, or has
    sent the whole object, so that no further range is requested."""


Ask = Callable[[int, int, str, int], Range]
"""Function that requests the bytes `start` to `end` - 1 of a remote object: (start, end, ETag that the object
must still have or "" for any, number of concurrent requests) -> response. It raises RemoteError if the object
was replaced or removed."""


class Ranges:
    """Reads the bytes of a remote object in order, by requests for ranges of bytes.

    While bytes arrive faster than FAST, each range is requested after the previous one, and is GROWTH times
    as long. After a slower range, all further ranges are short (PIECE) and requested concurrently. `read`
    raises RemoteError if a request fails.
    """

    def __init__(self, first: Range, ask: Ask, pool: Background) -> None:
        self._range: Range | None = first
        self._ask = ask
        self._pool = pool
        self._next = min(first.body.start + FIRST, first.size)
        self._size, self._version = first.size, first.version
        self._count = 0
        """Number of bytes that have arrived of the range of the remote object that is being read."""
        self._seconds = 0.0
        """Seconds spent on waiting for bytes of the range of the remote object that is being read."""
        self._ahead: deque[Future[tuple[int, bytearray]]] = deque()
        self._free: list[bytearray] = []
        self._taken: bytearray | None = None

    def read(self) -> Buffer:
        while self._range is not None:
            began = time.monotonic()
            data = self._range.body.read()
            self._seconds += time.monotonic() - began
            self._count += len(data)
            if data:
                return data
            self._range.body.close()
            self._range = self._following()
        if self._taken is not None:
            self._free.append(self._taken)
            self._taken = None
        try:
            while len(self._ahead) < AHEAD and self._next < self._size:
                start, end = self._advance(PIECE)
                buffer = self._free.pop() if self._free else bytearray(PIECE)
                self._ahead.append(self._pool.submit(partial(self._piece, start, end, buffer)))
            if not self._ahead:
                return b""
            size, self._taken = self._ahead.popleft().result()
            return memoryview(self._taken)[:size]
        except EndedError:
            raise RemoteError("the run ends") from None

    def close(self) -> None:
        if self._range is not None:
            self._range.body.close()
        for task in self._ahead:
            task.cancel()

    def _following(self) -> Range | None:
        if self._next >= self._size or self._seconds * FAST >= self._count:
            return None
        start, end = self._advance(GROWTH * self._count)
        self._count, self._seconds = 0, 0.0
        return self._exactly(start, end, 1)

    def _advance(self, count: int) -> tuple[int, int]:
        start, self._next = self._next, min(self._next + count, self._size)
        return start, self._next

    def _piece(self, start: int, end: int, buffer: bytearray) -> tuple[int, bytearray]:
        """Reads the bytes `start` to `end` - 1 of a remote object into the beginning of `buffer`, and returns
        (number of bytes, this buffer). Raises RemoteError if the request fails or the server sends fewer or
        more bytes."""
        have, size = 0, end - start
        with self._exactly(start, end, AHEAD).body as body:
            while more := body.read():
                if have + len(more) > size:
                    raise RemoteError("it sent another range than the requested one")
                buffer[have : have + len(more)] = more
                have += len(more)
        if have != size:
            raise RemoteError("it sent another range than the requested one")
        return have, buffer

    def _exactly(self, start: int, end: int, share: int) -> Range:
        response = self._ask(start, end, self._version, share)
        if response.body.start != start:
            response.body.close()
            raise RemoteError("it does not support ranges in all responses")
        return response
