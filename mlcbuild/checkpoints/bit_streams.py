"""Unpacks unsigned integers of a few bits from words in which they are stored one after the other, lowest
bits first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]


def unpacked(words: NDArray[Any], bits: int) -> Codes:
    """Unpacks unsigned integers of `bits` bits (1 to 8) from words [lines, words] of any integer type, and
    returns them as uint8 [lines, bits of a line // bits]. Each line is a separate stream of bits, in which
    the lowest bits of a word come first.
    An integer may cross the border of two words, as those of 3 bits do; bits that remain at the end of a line
    are ignored.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = raw[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return codes.reshape(len(raw), -1)
    flags = np.unpackbits(raw, axis=1, bitorder="little")
    flags = flags[:, : flags.shape[1] // bits * bits].reshape(len(raw), -1, bits)
    packed = np.packbits(flags, axis=2, bitorder="little")
    return packed.reshape(len(raw), -1)


def unpacked_fields(words: NDArray[Any], bits: int) -> Codes:
    """Unpacks unsigned integers of `bits` bits (1 to 8) from 32-bit words [lines, words], and returns them as
    uint8 [lines, words * (32 // bits)]. Each word holds 32 // bits integers, the first in its lowest bits; no
    integer crosses the border of two words.
    """
    if 32 % bits == 0:
        return unpacked(words, bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)
