"""The times that files of a store carry."""

from __future__ import annotations

STAMP = 315_532_800
"""mtime of every file in a store, in seconds: 1980-01-01, the first that every archive format can hold.
Any write moves a file's mtime, so a blob that still carries it was not written to."""
STAMP_NS = STAMP * 1_000_000_000
SPOILT = STAMP + 2
"""mtime of what was a blob until its bytes were found to be wrong though nobody wrote to it. In a bundle it
tells a damaged file of ours from one that a user changed. Two seconds are the coarsest clock's tick."""
