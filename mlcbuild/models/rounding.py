"""Rounds numbers to the floating-point types in which checkpoints store weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping


def f32(value: float) -> float:
    """Returns, as a Python float, the float32 nearest to a number. A finite number that float32 cannot hold,
    above 3.4e38 in magnitude, raises OverflowError."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def f16(value: float) -> float:
    """Returns, as a Python float, the float16 nearest to a number. A finite number that float16 cannot hold,
    from 65520 in magnitude, raises OverflowError."""
    rounded: float = struct.unpack("<e", struct.pack("<e", value))[0]
    return rounded


def bf16(value: float) -> float:
    """Returns, as a Python float, the bfloat16 (the upper half of a float32) nearest to a number; ties to
    even. A finite number above 3.4e38 in magnitude raises OverflowError; one from 3.396e38 on becomes
    infinite."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + ((bits >> 16) & 1)
    rounded: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]
    return rounded


ROUNDING: Mapping[str, Callable[[float], float]] = {"float32": f32, "float16": f16, "bfloat16": bf16}
"""Name of a dtype in config.json -> function that rounds a number to it."""
