"""Defines constants and rounding rules of group quantization (one scale per 32 weights), which formats and
kernels share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUP = 32
"""Number of consecutive weights of a row that share a scale."""
QUAD = 4
"""Number of consecutive weights that a byte dot-product instruction multiplies at once: the four bytes of an
int32 lane.
"""
QUADS = GROUP // QUAD
"""Number of quads (four consecutive weights) in a group of 32 weights: 8."""
TILE_ROWS = 16
"""Number of rows in a tile of the layout x16 of matrices: as many as int32 lanes in the widest vectors of
CPUs."""


def low_bits(bits: int) -> int:
    """Returns the number of low bits of each code that are packed first: 4, but 2 for codes of 3 bits and 8
    for codes of 8; its other bits, if any, are packed separately. bits: number of bits of a code: 3, 4, 5, 6
    or 8. In tiles of 16 rows (the layout x16), the other bits are in bytes of their own. In the layout `row`,
    the low bits of a whole row precede the other bits."""
    return 8 if bits == 8 else 2 if bits == 3 else 4


def row_words(bits: int, columns: int) -> int:
    """Returns the number of uint32 words that hold the codes of a matrix row in the layout `row`. bits: of a
    code; columns: length of the row, counted as if padded to a multiple of 32.

    Codes of 4 or 8 bits fill words from their low ends. Codes of 5 and 6 bits are divided: first the low four
    bits of all codes in the row, then their one or two high bits. Codes of 3 bits are divided into two low
    bits and a high bit in the same way. The row as a whole is padded to a multiple of four words.
    """
    count = -(-columns // GROUP) * bits
    return -(-count // 4) * 4


@dataclass(frozen=True)
class Groups:
    """The code range and rounding of a format with one scale per group of 32 weights; all arithmetic is
    float32, each step rounded to nearest even.

    A weight w is stored as the code q = clip(rint(w / scale + zero), 0, top), where `zero` is the code of the
    weight 0, `top` the largest code, and the scale has been rounded to `dtype`. Before that the scale is

      fit(w)              less than 8 bits: the scale of least weighted squared error, by `search.fit`
      -fit(w)             the same with signed scales
      max|w| / zero       8 bits
      extreme / -zero     8 bits with signed scales

    extreme is the weight of largest magnitude in the group with its sign, the positive one of two equal ones.

    Where an unsigned scale rounds to zero, the group is stored as zeros; with float16 scales, its weights are
    at most 2**-18 in magnitude. Where a signed scale rounds to zero, it is 2**-24, the smallest float16, and
    the codes follow from that, because the kernels of the layout x16 multiply scales by adding to their
    exponents.
    """

    bits: Literal[4, 5, 8]
    zero: int
    """The stored code that stands for the weight 0."""
    top: int
    """The largest integer code of a quantized weight."""
    dtype: Literal["float32", "float16"]
    """The type in which the scales of quantized weights are stored."""
    signed: bool = False
    """True if a scale has the opposite sign of the group's weight of largest magnitude, which so gets the
    stored code 0 or one near it: there is one more code below `zero` than above. False if scales of 8-bit
    codes are positive, and those of fewer bits have that weight's sign."""
