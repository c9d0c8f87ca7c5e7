"""How an action says how far it is. Outside a worker nobody listens, and nothing happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Listener: TypeAlias = Callable[[int, int, str], None]

_PERIOD = 0.2
"""Seconds between two reports that are passed on."""

_listener: Listener | None = None
_last = 0.0


def report(done: int, total: int = 0, unit: str = "") -> None:
    """`done` of `total` (0: not known) of something, such as "B" for bytes. Cheap: call it in a loop."""
    global _last  # noqa: PLW0603 - one listener per process, as there is one standard output
    now = time.monotonic()
    if _listener is not None and (now - _last >= _PERIOD or done == total):
        _last = now
        _listener(done, total, unit)


def listen(listener: Listener | None) -> None:
    """Sets who hears reports of this process."""
    global _listener  # noqa: PLW0603
    _listener = listener
