"""Defines the modification times (mtimes) that mark files in a store as unchanged."""

from __future__ import annotations

STAMP = 315_532_800
"""The mtime of every file in a store, in seconds: 1980-01-01, the earliest that all archive formats can hold.

Any write changes a file's mtime, so a blob with this mtime was not written to.
"""
STAMP_NS = STAMP * 1_000_000_000
SPOILT = STAMP + 2
"""The mtime, in seconds, of the links of a blob that was damaged although nobody wrote to it.

In a bundle it distinguishes a damaged file from one that a user changed. It differs from STAMP by two
seconds, the coarsest resolution of a filesystem's clock.
"""
