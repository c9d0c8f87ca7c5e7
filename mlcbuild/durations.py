"""Formats durations for people. This module imports nothing, so that a run that finds nothing to do and ends
at once can use it."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Formats a duration given in seconds: 0.12 s, 8.1 s, 3 min 04 s, 2 h 05 min. From an hour on, seconds
    are left out."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
