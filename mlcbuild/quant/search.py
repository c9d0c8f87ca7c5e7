"""Computes the scale of each group of 32 weights, for codes of 4 or 5 bits, that leaves the least squared
error, in which the error of a weight counts by the weight's magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.groups import QUAD, QUADS


@dataclass(frozen=True)
class Search:
    """Constants of the search for the scale of a group of 32 weights, for one number of bits per code."""

    unit: int
    """The integer to which the weight of largest magnitude in a group is scaled before the group's scale is
    searched."""
    shift: int
    """Number of bits by which a weight's magnitude, scaled so that the group's largest is `unit`, is shifted
    right to get the integer importance with which the weight's squared error counts. Sums of eight importance
    * code * code then fit in int16, which NumPy adds twice as fast as float32, and sums of 32 importance *
    code * weight are exact in float32."""
    widths: tuple[int, ...]
    """Step widths between neighbouring codes from which the search for a scale starts, in units in which the
    largest magnitude of the group is the integer `unit`. With the first width that magnitude gets the code
    `top`, with the second `top - 1`; so groups whose weights are multiples of such a step are represented
    exactly. With a third, narrower one that magnitude is clipped to `top`."""
    top: int
    """The largest code. Codes are 1 - top .. top. The sign of a group's scale is chosen such that the weight
    of largest magnitude, divided by the scale, is positive."""


SEARCHES = {4: Search(504, 3, (63, 72, 59), 8), 5: Search(240, 4, (15, 16), 16)}
"""Number of bits of a code -> constants of the search for the scale of a group of 32 weights: integer units,
step widths from which it starts, and largest code. With 8 bits there is no search, since it would reduce the
error very little."""
TINY = np.float32(2.0**-96)
"""Magnitude of a group's largest weight below which all weights of the group count as zeros when its scale is
searched: the inverse of a smaller one could overflow."""


def fit(
    search: Search, planes: NDArray[np.float32], extreme: NDArray[np.float32], scratch: Scratch
) -> NDArray[np.float32]:
    """Returns the best scale of each group of 32 weights for codes from 1 - t to t, where t is `search.top`,
    float32 [groups]. Scales may be negative, and are 0 for a group whose weights are all below 2**-96.

    search: the constants for the number of bits. planes: the weights, float32 [8, 4 * groups], whose row i
    holds the i-th four weights of every group. extreme: the weight of largest magnitude of each group,
    float32 [groups], finite.

    The scale is that of least squared error, weighted by the weights' magnitudes, as far as one step of
    Lloyd's method (1982) from two or three starting points gets there. With 4 bits: u = rint(w * (504 /
    extreme)) and v = |u| // 8; for steps of 63, 72 and 59 c = clip(floor(u / step + 1/2), -7, 8) and a =
    sum(v * u * c) / sum(v * c * c); the first c with the largest a * sum(v * u * c) gives fit = extreme * (a
    / 504). Sums are of whole numbers below 2**24, exact in any order. A group that was dequantized from codes
    -8 .. 7 and float16 scales is reproduced exactly if its extreme has the code -8 (8 here, since the scale's
    sign changes) or 7. With 5 bits it is the same with 240 for 504, |u| // 16, steps of 15 and 16, and codes
    -15 .. 16.

    In trained models, unlike random ones, large weights meet large activations. With all weights counting
    alike the squared error is 4 % lower, but the KL divergence of the tiny model in recipes/models is 0.0278
    in place of 0.0218 (Q4_0: 0.0259); for SmolLM2-135M from a file in Q4_1, both ways have the same KL
    divergence. Counting by squares or cubes is no better.
    """
    units = scratch.array("units", planes.shape, np.int16)
    codes = scratch.array("codes", planes.shape, np.int16)
    wide = scratch.array("moved", planes.shape, np.float32)
    np.multiply(planes, np.repeat(_inverse(extreme, search.unit), QUAD), out=wide)
    np.rint(wide, out=wide)
    np.copyto(units, wide, casting="unsafe")
    importance = scratch.array("importance", planes.shape, np.int16)
    np.right_shift(np.abs(units, out=importance), search.shift, out=importance)
    weighted = np.multiply(importance, units, out=wide, casting="unsafe")
    starts = len(search.widths)
    along = scratch.array("along", (starts, planes.size // QUADS), np.float32)
    sizes = scratch.array("sums", along.shape, np.int16)
    levels = scratch.array("levels", planes.shape, np.float32)
    for width, products, squares in zip(search.widths, along, sizes, strict=True):
        np.add(units, np.int16(width // 2), out=codes)
        np.floor_divide(codes, np.int16(width), out=codes)
        if width * search.top <= search.unit:  # A wider step would leave the largest codes unused.
            np.clip(codes, np.int16(1 - search.top), np.int16(search.top), out=codes)
        np.copyto(levels, codes)
        np.einsum("pq,pq->q", weighted, levels, out=products)
        np.multiply(codes, codes, out=codes)
        np.einsum("pq,pq->q", importance, codes, out=squares)
    along = along[:, ::QUAD] + along[:, 1::QUAD] + along[:, 2::QUAD] + along[:, 3::QUAD]
    size = _group_sums(sizes)
    steps = along / np.maximum(size, np.float32(1))
    gains = steps * along
    step, best = steps[0], gains[0]
    for a, gain in zip(steps[1:], gains[1:], strict=True):
        step, best = np.where(gain > best, a, step), np.maximum(gain, best)
    scale: NDArray[np.float32] = extreme * (step / np.float32(search.unit))
    return scale


def _inverse(extreme: NDArray[np.float32], unit: int) -> NDArray[np.float32]:
    """Returns the factor that scales the weight of largest magnitude of each group to the integer `unit`:
    unit / extreme, float32 [groups], and 0 where that magnitude is below TINY (2**-96). extreme: the weight
    of largest magnitude of each group, with its sign."""
    tiny = np.abs(extreme) < TINY
    if not tiny.any():  # nearly always
        return np.divide(np.float32(unit), extreme)
    return np.where(tiny, np.float32(0), np.float32(unit) / np.where(tiny, np.float32(1), extreme))


def _group_sums(sums: NDArray[np.int16]) -> NDArray[np.float32]:
    """Adds every four neighbours along the last axis of `sums`, int16 [..., 4 * groups], and returns the
    totals as float32 [..., groups]. The numbers must not be negative, because four of them are added at once
    as parts of a 64-bit integer; totals may exceed int16. Overwrites `sums`."""
    words, halves = sums.view(np.uint64), np.uint64(0x0000FFFF0000FFFF)
    pairs = words & halves
    np.right_shift(words, 16, out=words)
    np.bitwise_and(words, halves, out=words)
    np.add(pairs, words, out=pairs)
    parts = pairs.view(np.uint32)
    return (parts[..., ::2] + parts[..., 1::2]).astype(np.float32)
