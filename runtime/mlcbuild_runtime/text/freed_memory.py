"""Makes the C library's allocator return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import sys

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""The function malloc_trim of glibc; None without glibc, where allocators return memory by themselves."""


def give_back() -> None:
    """Makes the C library's allocator return its unused memory pages to the operating system. glibc would
    keep pages between used ones for good: about half of the memory of a grammar that was compiled to
    constrain answers. Without glibc it does nothing."""
    if _TRIM is not None:
        _TRIM(0)
