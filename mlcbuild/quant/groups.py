"""Defines the sizes and numbers, for groups of weights with one scale, that formats and kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUP = 32
"""Number of consecutive weights of a row that share a scale."""
QUAD = 4
"""Number of consecutive weights that byte products multiply at once: the four bytes of an int32 lane."""
QUADS = GROUP // QUAD
"""Number of quads (four consecutive weights) in a group."""
TILE_ROWS = 16
"""Number of rows in a tile of the layout x16: as many as int32 lanes in the widest vectors of CPUs."""


def row_words(bits: int, columns: int) -> int:
    """Returns the number of uint32 words that hold the codes of a row in the layout row.

    4 or 8 bits fill words from their low ends. Of 5 and 6 bits, the low four come first for the whole row,
    and then the high ones, 32 or 16 in a word; rows are padded to whole vectors of four words.
    """
    count = -(-columns // GROUP) * bits
    return -(-count // 4) * 4


@dataclass(frozen=True)
class Groups:
    """The integers and rounding of a format with one scale per group; all arithmetic is float32, each step
    rounded to nearest even.

    q = clip(rint(w / scale + zero), 0, top), the scale being rounded to `dtype` first. Before that it is

      fit(w)              less than 8 bits: see `fit` in search.py
      -fit(w)             the same with signed scales
      max|w| / zero       8 bits
      extreme / -zero     8 bits with signed scales

    extreme is the weight of largest magnitude with its sign, the positive one of two equal ones.

    A scale that rounds to zero is zero, and its group stored as zeros: all its weights are below 2**-21 for
    float16. A signed scale is then 2**-24, the smallest float16: the kernels of x16 multiply scales by adding
    to their exponents.
    """

    bits: Literal[4, 5, 8]
    zero: int
    """The stored code that stands for the weight 0."""
    top: int
    """The largest integer code of a quantized weight."""
    dtype: Literal["float32", "float16"]
    """The type in which scales are stored."""
    signed: bool = False
    """True if scales may be negative. The weight of largest magnitude then always gets the code 0, the end of
    the range with one more level.
    """
