"""Quantizes floating point weights to codes with scales and minima of two levels: each is the product of a
float16 shared by 256 weights and an integer of its group of 16 or 32 weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlcbuild.quant.blocks import BLOCK_WEIGHTS, BlockRows, Blocks
from mlcbuild.quant.floats import BLOCK, OVERFLOW, Array, largest, not_finite, overflow, widened
from mlcbuild.quant.groups import GROUP

Floats = NDArray[np.float32]

_STARTS = (0.5, 0.0, -0.5, -1.0, -1.5, -2.0)
"""Numbers added to the largest code; the range of a group's weights is divided by each sum to get the step
widths from which the search for a scale starts. With half of them the squared error is 4 % larger (weights of
Student's t, 5 degrees of freedom); each takes 2 of the 30 ns that the search takes for a weight."""
_SIGNED_STARTS = (0.0, 0.2, 0.4, 0.6, 0.8, -0.2)
"""Starting points of the search for the scale of eight signed codes, -4 to 3, if all columns count alike. For
each number s, the search starts from the scale that divides the weight of largest magnitude to s - 4; with s
= 0, this is the lowest code. With the first number alone, the squared error of gaussian weights is 6 %
larger. Codes of more bits use the first number alone: with 64 codes, the others gain nothing."""
_WEIGHED_SIGNED_STARTS = (*_SIGNED_STARTS, -0.5, -1.0, -1.5, -2.0, -3.0)
"""Starting points of the search for a group's scale with signed codes if columns differ in importance. For
each number s, the search starts from the scale with which the weight of largest magnitude is s steps above
the lowest code. With s below 0 that weight lies beyond the codes and is clipped, which suits a large weight
of little importance. Measured loss of SmolLM2-135M in 3 bits with calibration: 0.53 nats without the last
five numbers, 0.33 nats with them."""
_MOST_STEPS, _MOST_MINIMUM_STEPS = 127, 255
"""The largest integer factors of groups: of scales 127 (-127 to 127, stored as int8), of minima 255 (0 to
255, stored as uint8)."""


def quantize(blocks: Blocks, weight: Array, name: str, importance: Floats | None = None) -> list[BlockRows]:
    """Quantizes a matrix [N, K] with two-level scales, and returns its codes, scales and minima as a list of
    BlockRows, each with some consecutive rows, in order.

    weight: float32, float16, or bfloat16 bits in uint16. Columns are padded with zeros to whole groups of 32.
    importance: factor of each column's squared error, float32 [K], such as the mean square of the activations
    that are multiplied with it; None: all columns count alike. Raises CheckpointError, with `name` in its
    message, for weights that are infinite or NaN, or need a scale beyond float16.
    """
    step = max(1, BLOCK // max(1, weight.shape[1]))
    return [
        _rows(blocks, widened(np.ascontiguousarray(weight[start : start + step])), name, importance)
        for start in range(0, weight.shape[0], step)
    ]


def _rows(blocks: Blocks, weight: Floats, name: str, importance: Floats | None) -> BlockRows:
    greatest = largest(weight)
    if not np.isfinite(greatest):
        raise not_finite(name)
    if (unit := greatest / ((1 << blocks.bits) - 1) / _MOST_STEPS) >= OVERFLOW:
        raise overflow(name, unit, "weights that need a scale of ")
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // BLOCK_WEIGHTS) * BLOCK_WEIGHTS), np.float32)
    padded[:, :columns] = weight
    # The weights of a group lie along axis 0, so that every step is one call over long contiguous rows.
    planes = np.ascontiguousarray(padded.reshape(-1, blocks.group).T)
    shares = None if importance is None else _shares(blocks, importance, rows)
    wide, least = (
        _with_minimum(blocks, planes, shares) if blocks.minimum else (_signed(blocks, planes, shares), None)
    )
    count = BLOCK_WEIGHTS // blocks.group
    scale, steps = _levels(wide.reshape(-1, count), _MOST_STEPS, name)
    minimum = minimum_steps = None
    offset: Floats | None = None
    if least is not None:
        minimum, minimum_steps = _levels(least.reshape(-1, count), _MOST_MINIMUM_STEPS, name)
        offset = (minimum[:, None] * minimum_steps).reshape(-1)
    codes = _codes(blocks, planes, (scale[:, None] * steps).reshape(-1), offset).T
    padded_columns = -(-columns // GROUP) * GROUP
    groups = padded_columns // blocks.group
    numbers = codes.reshape(rows, -1)[:, :padded_columns]
    return BlockRows(
        numbers.astype(np.int8) if blocks.signed else numbers.astype(np.uint8),
        scale.reshape(rows, -1),
        steps.reshape(rows, -1)[:, :groups].astype(np.int8),
        None if minimum is None else minimum.reshape(rows, -1),
        None if minimum_steps is None else minimum_steps.reshape(rows, -1)[:, :groups].astype(np.uint8),
    )


def _shares(blocks: Blocks, importance: Floats, rows: int) -> Floats:
    """Returns the factors by which the squared errors of `rows` rows of weights are multiplied, the same in
    each row, float32 [weights of a group, groups of all rows]. importance: factor of each column, float32
    [columns]; it is divided by the greatest. Quotients below a millionth, and columns that pad rows to a
    multiple of 256, count a millionth, so that sums stay above zero, even if all are 0."""
    greatest = np.float32(max(float(importance.max(initial=0)), 1e-37))
    padded = np.full(-(-importance.size // BLOCK_WEIGHTS) * BLOCK_WEIGHTS, 1e-6, np.float32)
    padded[: importance.size] = np.maximum(importance / greatest, np.float32(1e-6))
    return np.ascontiguousarray(np.tile(padded.reshape(-1, blocks.group).T, rows))


def _weighted(values: Floats, shares: Floats | None) -> Floats:
    """Returns `values`, numbers [weights of a group, groups], times `shares`, the factors of the weights'
    squared errors in the same shape; `values` itself if `shares` is None."""
    return values if shares is None else values * shares


def _with_minimum(blocks: Blocks, planes: Floats, shares: Floats | None) -> tuple[Floats, Floats]:
    """Returns (scales, minima) of least squared error for groups of weights, each float32 [groups]; minima
    are at most 0. planes: the weights [weights of a group, groups]; shares: factors of their squared errors
    in the same shape, or None.

    From each of several starting points the codes are rounded; the best scale and minimum for these codes
    follow from two linear equations. Those with the least error are returned.
    """
    size = np.float32(blocks.group) if shares is None else shares.sum(axis=0)
    top = (1 << blocks.bits) - 1
    low, high = np.minimum(planes.min(axis=0), 0), np.maximum(planes.max(axis=0), 0)
    weights = _weighted(planes, shares)
    total = weights.sum(axis=0)
    best: tuple[Floats, Floats] = (high, low)
    least = np.full(low.shape, np.inf, np.float32)
    for start in _STARTS:
        scale, minimum = (high - low) / np.float32(top + start), low
        codes = _codes(blocks, planes, scale, minimum)
        ones, squares = (_weighted(values, shares).sum(axis=0) for values in (codes, np.square(codes)))
        along = np.multiply(codes, weights).sum(axis=0)
        spread = size * squares - ones * ones
        # Sums with factors are not exact: where all codes are equal, the difference is a rounding error.
        solvable = spread > (0 if shares is None else 1e-5 * size * squares)
        spread = np.where(solvable, spread, 1)
        scale = np.where(solvable, (size * along - total * ones) / spread, scale)
        minimum = np.where(solvable, (squares * total - ones * along) / spread, minimum)
        # Stored minima are at most 0, so that zeros of a group stay near codes.
        above = minimum > 0
        scale = np.where(above, along / np.where(squares > 0, squares, 1), scale)
        minimum = np.where(above, 0, minimum)
        error = scale * (scale * squares + 2 * (minimum * ones - along)) + minimum * (
            size * minimum - 2 * total
        )
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better, scale, best[0]), np.where(better, minimum, best[1])
    return best


def _signed(blocks: Blocks, planes: Floats, shares: Floats | None) -> Floats:
    """Returns the scale of each group of weights for signed codes, float32 [groups]. planes: the weights
    [weights of a group, groups]; shares: factors of their squared errors in the same shape, or None.

    A scale has the opposite sign of the group's weight of largest magnitude, which so gets the lowest code,
    -2**(bits - 1), or one near it. Of several starting points, the scale of least squared error for their
    codes is returned.
    """
    high, low = planes.max(axis=0), planes.min(axis=0)
    extreme = np.where(high >= -low, high, low)
    weights = _weighted(planes, shares)
    best: Floats = extreme
    least = np.full(extreme.shape, np.inf, np.float32)
    starts: tuple[float, ...] = _SIGNED_STARTS if blocks.bits == 3 else _SIGNED_STARTS[:1]
    if shares is not None:
        starts = _WEIGHED_SIGNED_STARTS
    for start in starts:
        scale = extreme / np.float32(start - blocks.zero)
        codes = _codes(blocks, planes, scale, None)
        along = np.multiply(codes, weights).sum(axis=0)
        squares = _weighted(np.square(codes), shares).sum(axis=0)
        scale = np.where(squares > 0, along / np.where(squares > 0, squares, 1), scale)
        error = scale * (scale * squares - 2 * along)
        better = error < least
        least, best = np.where(better, error, least), np.where(better, scale, best)
    return best


def _codes(blocks: Blocks, planes: Floats, scale: Floats, minimum: Floats | None) -> Floats:
    """Returns the codes of weights as whole numbers in float32 [weights of a group, groups]: (weight -
    minimum) / scale, rounded to nearest, ties to even, and clipped to the codes of the format `blocks`: from
    -2**(bits - 1) if they are signed, otherwise from 0. planes: the weights in the same shape; scale,
    minimum: float32 [groups]; minimum None: 0. Codes are 0 where the scale's magnitude is at most 2**-100."""
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) > 2.0**-100)
    codes = planes * inverse if minimum is None else (planes - minimum) * inverse
    np.rint(codes, out=codes)
    lowest = -blocks.zero
    clipped: Floats = np.clip(codes, lowest, lowest + (1 << blocks.bits) - 1, out=codes)
    return clipped


def _levels(numbers: Floats, most: int, name: str) -> tuple[Floats, Floats]:
    """Approximates the float32 `numbers` [rows, count] by products of one float16 for each row and one
    integer for each number, whose magnitude is at most `most` (127 for scales; 255 for minima, whose integers
    are at least 0). Returns (the float16 numbers as float32 [rows], the integers as float32 [rows, count]). A
    number that is not zero gets the integer zero only if its row's float16 is zero. Raises CheckpointError,
    with `name` in its message, if a float16 would be infinite."""
    extreme = np.where(numbers.max(axis=1) >= -numbers.min(axis=1), numbers.max(axis=1), numbers.min(axis=1))
    unit = extreme / np.float32(most)
    if (greatest := largest(unit)) >= OVERFLOW:
        raise overflow(name, greatest, "weights that need a scale of ")
    half = unit.astype(np.float16)
    # Where the float16 is too small by more than half a step, the next one takes its place.
    short = np.abs(half.astype(np.float32)) * np.float32(most + 0.5) < np.abs(extreme)
    next_one = np.nextafter(half, np.copysign(np.inf, extreme).astype(np.float16))
    half = np.where(short, next_one, half)
    scale = half.astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
    steps = np.rint(numbers / divisor)
    steps = np.where((steps == 0) & (numbers != 0), np.sign(numbers * divisor), steps)
    steps = np.where(scale[:, None] == 0, np.float32(0), steps)
    return scale, np.clip(steps, -most if most == _MOST_STEPS else 0, most).astype(np.float32)
