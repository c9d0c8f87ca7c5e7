"""SIGINT and SIGTERM as something a loop can wait for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def caught(interrupt: Callable[[str], None], inline: bool) -> Iterator[int]:
    """A descriptor that becomes readable on SIGINT or SIGTERM, after `interrupt` was told its name."""
    reading, writing = os.pipe()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt(signal.Signals(number).name)
        os.write(writing, b"\0")
        if inline:  # the action runs in this very thread
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in _SIGNALS} if mine else {}
    try:
        yield reading
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        os.close(reading)
        os.close(writing)
