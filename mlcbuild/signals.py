"""Handles requests to end a run: SIGINT and SIGTERM, and cancellation by the caller."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Bell:
    """A pipe that wakes a loop which waits for its file descriptor to become readable. Any thread may wake
    the loop with `ring`, which does nothing after the pipe was closed.
    """

    def __init__(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._reading = reading
        self._writing = writing
        self._guard = threading.RLock()  # A signal handler may ring while its thread holds the lock.
        self._open = True

    def fileno(self) -> int:
        return self._reading

    def ring(self) -> None:
        with self._guard, suppress(BlockingIOError):  # If the pipe is full, it wakes the loop already.
            if self._open:
                os.write(self._writing, b"\0")

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def heard(self) -> None:
        """Reads all bytes that `ring` wrote to the pipe, so that a loop which waits for the pipe sleeps until
        the next call of `ring`."""
        with suppress(BlockingIOError):
            os.read(self._reading, 1 << 16)

    def close(self) -> None:
        with self._guard:
            self._open = False
            os.close(self._reading)
            os.close(self._writing)


class Interruption:
    """A function that ends one run early. Any thread or signal handler may call it, with the reason as
    argument; the first reason is kept."""

    def __init__(self, bell: Bell, stop: Callable[[], None]) -> None:
        self.reason = ""
        """The reason why the run ends: the signal's name, or the reason of the caller's cancellation; ""
        while the run continues."""
        self._bell = bell
        self._stop = stop

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._stop()
        self._bell.ring()


class Cancellation:
    """An object with which a caller ends runs early. `cancel` may be called from any thread, an event handler
    or a signal handler."""

    def __init__(self) -> None:
        self.reason = ""
        """The reason for the cancellation, as the result of the run reports it; "" until `cancel` is
        called."""
        self._listeners: list[Callable[[str], None]] = []

    def cancel(self, reason: str = "the caller") -> None:
        """Makes the runs to which this object was passed, and those to which it will be passed, end early;
        does not wait for their end. Only the first reason is kept."""
        self.reason = self.reason or reason
        for listener in tuple(self._listeners):
            listener(self.reason)

    @contextmanager
    def attached(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Returns a context in which `listener` is called with the reason each time `cancel` is called, and
        at once if it was called before."""
        self._listeners.append(listener)
        try:
            if self.reason:
                listener(self.reason)
            yield
        finally:
            self._listeners.remove(listener)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def caught(interrupt: Callable[[str], None], inline: bool) -> Iterator[None]:
    """Returns a context in which SIGINT and SIGTERM call `interrupt` with the signal's name, in place of
    their earlier handlers, which it restores at its end. In any thread but the main one it changes nothing.

    inline: True if build steps run in this thread; either signal then also raises KeyboardInterrupt, which
    ends them.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt(signal.Signals(number).name)
        if inline:
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in _SIGNALS} if mine else {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
