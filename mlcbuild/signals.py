"""SIGINT and SIGTERM as something a loop can wait for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Bell:
    """Wakes a loop that waits for a descriptor. May be rung from any thread, and after it was closed."""

    def __init__(self, reading: int, writing: int) -> None:
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._reading = reading
        self._writing = writing
        self._guard = threading.RLock()  # a signal handler may ring while its own thread does
        self._open = True

    def fileno(self) -> int:
        return self._reading

    def ring(self) -> None:
        with self._guard, suppress(BlockingIOError):  # full: it rings already
            if self._open:
                os.write(self._writing, b"\0")

    def heard(self) -> None:
        """Silences it until it is rung again."""
        with suppress(BlockingIOError):
            os.read(self._reading, 1 << 16)

    def close(self) -> None:
        with self._guard:
            self._open = False
            os.close(self._reading)
            os.close(self._writing)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def caught(interrupt: Callable[[str], None], inline: bool) -> Iterator[Bell]:
    """A bell that rings on SIGINT or SIGTERM, after `interrupt` was told the signal's name."""
    bell = Bell(*os.pipe())

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt(signal.Signals(number).name)
        bell.ring()
        if inline:  # the action runs in this very thread
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in _SIGNALS} if mine else {}
    try:
        yield bell
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        bell.close()
