"""An object read in ranges, by as many connections as are worth it.

Some servers give each connection only a share of what they have, and some give all of it to one; several
connections cost such a one, and the processors here, a fifth more.
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
"""Bytes of the first range: it shows how fast the server is."""
FAST = 200_000_000
"""Bytes per second of one connection, from which on it stays one."""
GROWTH = 8
"""How many times as long as the one before the next one is."""
PIECE = 4 << 20
"""Bytes of a range when several are on their way."""
AHEAD = 6
"""Such ranges at once. Of each object no more are in memory, and the one that was taken."""


@dataclass(frozen=True)
class Range:
    """What came for a range that was asked for: just that, or all of the object."""

    body: Body
    size: int
    """Of the object."""
    version: str
    """The object's ETag; "" when the server says none."""


Ask = Callable[[int, int, str, int], Range]
"""Asks for the bytes from one offset up to another, of a version, as one of so many that come at once."""


class Ranges:
    """The bytes of an object in order.

    While they come fast, a range is asked for when the one before has come, and is much longer. After one
    that comes slowly, all that follow are short and on their way at the same time.
    """

    def __init__(self, first: Range, ask: Ask, pool: Background) -> None:
        self._range: Range | None = first
        self._ask = ask
        self._pool = pool
        self._next = min(first.body.start + FIRST, first.size)
        self._size, self._version = first.size, first.version
        self._count = 0
        """Bytes of the range that have come."""
        self._seconds = 0.0
        """Of waiting for them."""
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
        """Fills a buffer: how far, and the buffer."""
        have, size = 0, end - start
        with self._exactly(start, end, AHEAD).body as body:
            while more := body.read():
                if have + len(more) > size:
                    raise RemoteError("it answered another range than the one it was asked for")
                buffer[have : have + len(more)] = more
                have += len(more)
        if have != size:
            raise RemoteError("it answered another range than the one it was asked for")
        return have, buffer

    def _exactly(self, start: int, end: int, share: int) -> Range:
        found = self._ask(start, end, self._version, share)
        if found.body.start != start:
            found.body.close()
            raise RemoteError("it does not always know ranges")
        return found
