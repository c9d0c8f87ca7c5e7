"""Computes the slopes of ALiBi: attention biases that are linear in the distance of a key (Press et al.,
2022)."""

from __future__ import annotations

import math

from mlcbuild.models.layers import Alibi
from mlcbuild.models.rounding import bf16, f32


def slopes(heads: int, kind: Alibi | None) -> tuple[float, ...]:
    """Returns the ALiBi slopes, one for each of `heads` query heads (at least 1), in their order, rounded to
    float32, or to bfloat16 for the kind "bfloat16".

    For 2^k heads the slopes are 2^(-8 i / 2^k) for i = 1, 2, ... Another number of heads gets the slopes of
    the next smaller power of two, then those of twice that power for i = 1, 3, 5, ..., as many as are
    missing.
    """
    power_of_two = 1 << (heads.bit_length() - 1)
    values = [_slope(power_of_two, i) for i in range(1, power_of_two + 1)]
    values += [_slope(2 * power_of_two, i) for i in range(1, 2 * (heads - power_of_two), 2)]
    return tuple(bf16(value) if kind == "bfloat16" else value for value in values)


def _slope(heads: int, i: int) -> float:
    """Returns the ALiBi slope of head `i`, counted from 1, of `heads` heads, a power of two: the i-th power
    of 2^(-8 / heads), with base and result rounded to float32, as the models compute it."""
    base = f32(2.0 ** -(2.0 ** -(math.log2(heads) - 3)))
    return f32(base**i)
