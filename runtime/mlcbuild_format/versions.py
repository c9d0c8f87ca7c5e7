"""The names of the formats that the builder writes and a runtime reads, each in one place.

A step that writes weights depends on this file and not on the whole ABI, so that an edit there converts no
checkpoint again.
"""

from __future__ import annotations

LIBRARY = "mlcbuild-library/2"
"""`format` in the metadata of a library: its functions are those of abi.py."""
WEIGHTS = "mlcbuild-weights/1"
"""`format` in the metadata of a weights file."""
