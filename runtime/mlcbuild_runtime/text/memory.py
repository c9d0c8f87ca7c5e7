"""Gives freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""Part of glibc only. Other allocators give memory back by themselves, sooner or later."""


def give_back() -> None:
    """Returns the allocator's unused pages to the system: glibc keeps those between others for good, about
    half of what a constraint took."""
    if _TRIM is not None:
        _TRIM(0)
