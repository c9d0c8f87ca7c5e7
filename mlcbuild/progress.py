"""Passes progress reports of a build step to a listener, a function. Reports are ignored if there is none, as
outside of worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Listener: TypeAlias = Callable[[int, int, str], None]

_PERIOD = 0.2
"""Minimum seconds between two progress reports that reach the listener."""

_listener: Listener | None = None
_last = 0.0


def report(done: int, total: int = 0, unit: str = "") -> None:
    """Calls the listener, if there is one, with the progress of a build step: `done` of `total` units of work
    are finished. Reports less than 0.2 s after the last one that reached it are dropped, unless the work is
    done. total: 0 if unknown; unit: for example "B" for bytes. It is cheap enough for inner loops."""
    global _last  # noqa: PLW0603 - one listener per process, as there is one standard output
    now = time.monotonic()
    if _listener is not None and (now - _last >= _PERIOD or done == total):
        _last = now
        _listener(done, total, unit)


def listen(listener: Listener | None) -> None:
    """Sets the function that receives the progress reports of this process, as (done, total, unit); None
    removes it."""
    global _listener  # noqa: PLW0603
    _listener = listener
