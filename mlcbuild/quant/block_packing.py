"""Packs codes, scales and minima of quantized checkpoints into stored tensors without changing any value, and
dequantizes such tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlcbuild.quant import row_packing
from mlcbuild.quant.blocks import BLOCK_WEIGHTS, BlockRows, Blocks
from mlcbuild.quant.floats import Array, not_finite
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE_ROWS, low_bits

_LARGEST_SCALE = np.float32(2.0**120)
"""Limit, 2**120, that the magnitudes of scales and minima of quantized checkpoints must not reach: products
of larger ones with codes might be infinite. No published file comes near."""


def pack(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> Sequence[Array]:
    """Packs the codes, scales and minima of a quantized matrix in tiles of 16 rows and groups of 32 columns
    (the layout x16). Returns codes, uint8 [tiles, groups, 64 * bits], then scales [tiles, scales of a row,
    16] or, if a scale is an integer times a float16, these integers uint8 in the same shape and float16
    [tiles, blocks of 256 columns, 16]; then minima alike, if the format has them. blocks: the format's types
    of codes and scales; rows: consecutive rows of the matrix.

    Raises CheckpointError, with `name` in its message, if a scale or a minimum is NaN, or of a magnitude of
    2**120 or more.
    """
    codes, *numbers = _joined(blocks, rows, name)
    dtypes = _number_dtypes(blocks)
    scales = [_in_tiles(field, dtype) for field, dtype in zip(numbers, dtypes, strict=True)]
    return _packed_codes(blocks, codes), *scales


def pack_rows(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> Sequence[Array]:
    """Packs the codes, scales and minima of a quantized matrix row by row (the layout `row`) and returns
    (q_weight, q_scale): the codes in words, uint32 [rows, words of a row], and scales with minima, [rows,
    numbers of a row]. blocks: the format's types of codes and scales; rows: consecutive rows of the matrix;
    name: its name in messages. Raises CheckpointError if a scale or a minimum is NaN, or of a magnitude of
    2**120 or more."""
    return row_packing.pack_blocks(blocks, _joined(blocks, rows, name))


def _joined(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> list[NDArray[Any]]:
    """Converts quantized rows to the numbers that a format stores, and returns a list of arrays with all
    rows: codes uint8 [rows, columns], then scales and, if the format has them, minima, each [rows, numbers of
    a row]; two-level ones as two arrays, first the groups' integers, uint8, then the floats shared by 256
    weights. rows: consecutive rows of a matrix, in one or several objects. Raises CheckpointError, with
    `name` in its message, if the magnitude of a scale or a minimum is not a finite number below 2**120."""
    parts = [_conformed(blocks, part, name) for part in rows]
    return [np.concatenate(fields) if len(parts) > 1 else fields[0] for fields in zip(*parts, strict=True)]


def _number_dtypes(blocks: Blocks) -> list[DTypeLike]:
    levels: list[DTypeLike] = [np.uint8, np.float16]
    floats: list[DTypeLike] = [blocks.scale, np.float16]
    return levels * (1 + blocks.minimum) if blocks.scale == "levels" else floats[: 1 + blocks.minimum]


def _conformed(blocks: Blocks, rows: BlockRows, name: str) -> tuple[NDArray[Any], ...]:
    """Converts quantized rows to the numbers that a format stores, and returns the codes, uint8 [rows,
    columns], then scales and minima, each [rows, numbers of a row], in the order of the format's tensors;
    two-level ones as two arrays, the groups' integers, uint8, and the floats shared by 256 weights. If the
    format has smaller groups of weights than `rows`, each scale and minimum is repeated for them; if only the
    format has minima, they are zero.

    Raises CheckpointError, with `name` in its message, if a scale or a minimum is NaN, or its magnitude is
    2**120 or larger, or if a code is an 8-bit float that is infinite or NaN.
    """
    codes = rows.codes.view(np.uint8) + np.uint8(blocks.zero)
    if blocks.table is not None:
        codes = _codes_of(blocks.table)[codes]
    if blocks.floats is not None and ((codes & 127) > blocks.floats.largest).any():
        raise not_finite(name)
    for number in (rows.scale, rows.minimum):
        if number is not None and not (np.abs(number) < _LARGEST_SCALE).all():
            raise not_finite(name)
    fields: list[NDArray[Any]] = []
    for number, steps in ((rows.scale, rows.steps), (rows.minimum, rows.minimum_steps))[: 1 + blocks.minimum]:
        # Adding -0 changes nothing, not even the sign of a zero.
        minima = np.full_like(rows.scale, -0.0) if number is None else number
        if blocks.scale != "levels":
            fields.append(np.repeat(minima, codes.shape[1] // blocks.group // minima.shape[1], axis=1))
            continue
        count = codes.shape[1] // blocks.group
        steps_as_bytes = np.zeros((len(codes), count), np.uint8) if steps is None else steps.view(np.uint8)
        fields += [np.repeat(steps_as_bytes, count // steps_as_bytes.shape[1], axis=1), minima]
    return codes, *fields


@cache
def _codes_of(table: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns, for each byte of an int8, the first code that stands for this integer; 0 if none does."""
    codes = np.zeros(256, np.uint8)
    for code, value in reversed([*enumerate(table)]):
        codes[value & 255] = code
    return codes


def _whole_tiles(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a two-dimensional array padded with rows of zeros to a multiple of 16 rows; the array itself if
    it has such a number."""
    missing = -len(array) % TILE_ROWS
    return np.pad(array, ((0, missing), (0, 0))) if missing else array


def _in_tiles(numbers: NDArray[Any], dtype: DTypeLike) -> Array:
    """Rearranges numbers [rows, count] by tiles of 16 rows, padded with zeros, and returns them as `dtype`,
    [tiles, count, 16]. count: number of scales or minima in a row.
    """
    padded = _whole_tiles(numbers)
    return np.ascontiguousarray(padded.reshape(-1, TILE_ROWS, padded.shape[1]).swapaxes(1, 2)).astype(
        dtype, copy=False
    )


def _packed_codes(blocks: Blocks, codes: NDArray[np.uint8]) -> Array:
    """Packs codes, uint8 [rows, columns], in tiles of 16 rows (the layout x16), padded with rows of zeros,
    and returns uint8 [tiles, groups of 32 columns, 64 * bits]. Its bytes are [line][row][weight of a quad], a
    quad being four consecutive columns. Line j of four holds the low four bits of quad j and, above them, of
    quad 4 + j; lines with the high bits follow, as `_high_bits` packs them. With 8 bits line j holds quad j;
    with 3 bits line j of two holds the low two bits of quads j, 2 + j, 4 + j and 6 + j."""
    padded = np.ascontiguousarray(_whole_tiles(codes))
    groups = padded.shape[1] // GROUP
    words = padded.view(np.uint32).reshape(-1, TILE_ROWS, groups, QUADS).transpose(0, 2, 3, 1)
    words = np.ascontiguousarray(words)  # [tile, group, quad, row], a quad of codes in each
    width = low_bits(blocks.bits)
    if width == 8:
        return words.view(np.uint8).reshape(*words.shape[:2], -1)
    low, count = words & _in_each_byte((1 << width) - 1), QUADS * width // 8
    packed = low[:, :, :count].copy()
    for field in range(1, 8 // width):
        packed |= low[:, :, field * count : (field + 1) * count] << np.uint32(width * field)
    lines = [packed]
    if blocks.bits > width:
        above = words >> np.uint32(width) & _in_each_byte((1 << blocks.bits - width) - 1)
        lines += [line[:, :, None] for line in _high_bits(blocks.bits - width, above)]
    return np.concatenate(lines, axis=2).view(np.uint8).reshape(*words.shape[:2], -1)


def _in_each_byte(value: int) -> np.uint32:
    """Returns an integer with `value` in each of its four bytes."""
    return np.uint32(value * 0x01010101)


def _high_bits(width: int, high: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
    """Packs the high bits of codes, `width` (1 or 2) of each code, and yields `width` arrays uint32 [tiles,
    groups, rows]. A quad is four consecutive weights. Byte i of a word holds the high bits of the i-th weight
    in each of 8 / width consecutive quads, those of the first quad in its lowest bits.

    high: the high bits, uint32 [tile, group, quad, row], with one byte for each weight of a quad.
    """
    count = 8 // width
    for first in range(0, QUADS, count):
        line = np.zeros_like(high[:, :, 0])
        for place in range(count):
            line |= high[:, :, first + place] << np.uint32(width * place)
        yield line


def unpack(blocks: Blocks, tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Dequantizes tensors in the layout x16 (tiles of 16 rows) and returns float32 [N, K] without padding:
    code * scale + minimum, each operation rounded. tensors: q_weight, then those of scales and minima; shape:
    (N, K)."""
    rows, columns = shape
    q_weight, *numbers = tensors
    padded = q_weight.shape[1] * GROUP
    codes = _codes(blocks, q_weight)[:rows] - np.uint8(blocks.zero)
    value = row_packing.code_values(blocks, codes).reshape(rows, -1, blocks.group)
    count = 2 if blocks.scale == "levels" else 1
    scale, *minimum = (
        _numbers(blocks, numbers[i : i + count], np.uint8 if i else np.int8, padded)[:rows, :, None]
        for i in range(0, len(numbers), count)
    )
    value *= scale
    for offset in minimum:
        value += offset
    return np.ascontiguousarray(value.reshape(rows, -1)[:, :columns])


def _numbers(blocks: Blocks, tensors: Sequence[Array], steps: DTypeLike, columns: int) -> NDArray[np.float32]:
    """Returns the scales, or the minima, of a matrix in tiles of 16 rows (the layout x16) as float32 [rows
    rounded up to a multiple of 16, columns / group]. tensors: the stored numbers or, with two-level scales,
    the integer of each group and the float16 of each 256 weights. steps: type of these integers."""
    first = _by_rows(tensors[0])
    if len(tensors) == 1:
        return first.astype(np.float32)
    block = _by_rows(tensors[1]).astype(np.float32)
    block = np.repeat(block, BLOCK_WEIGHTS // blocks.group, axis=1)[:, : columns // blocks.group]
    wide: NDArray[np.float32] = block * first.view(steps)
    return wide


def _by_rows(tensor: Array) -> NDArray[Any]:
    """Returns the numbers of a tensor [tiles, count, 16], which holds `count` numbers for each of the 16
    matrix rows of a tile, as [tiles * 16, count], one matrix row after the other."""
    tiles = tensor.shape[0]
    rows_of_tiles = tensor.reshape(tiles, -1, TILE_ROWS).swapaxes(1, 2)
    return np.ascontiguousarray(rows_of_tiles).reshape(tiles * TILE_ROWS, -1)


def _codes(blocks: Blocks, q_weight: Array) -> NDArray[np.uint8]:
    """Unpacks q_weight, the codes of a matrix in tiles of 16 rows (the layout x16), and returns them as they
    are stored (at least 0), with one byte each: uint8 [rows rounded up to a multiple of 16, columns].
    q_weight: uint8 [tiles, groups of 32 columns, 64 * bits]."""
    tiles, groups, _ = q_weight.shape
    lines = np.ascontiguousarray(q_weight).view(np.uint8).reshape(tiles, groups, -1, TILE_ROWS, QUAD)
    low = low_bits(blocks.bits)
    count, width = QUADS * low // 8, blocks.bits - low
    fields = [lines[:, :, :count] >> low * field & (1 << low) - 1 for field in range(8 // low)]
    quads = np.concatenate(fields, axis=2)
    for quad in range(QUADS if width else 0):
        line, place = divmod(quad, 8 // width)
        quads[:, :, quad] |= (lines[:, :, count + line] >> width * place & (1 << width) - 1) << low
    return np.ascontiguousarray(quads.transpose(0, 3, 1, 2, 4)).reshape(tiles * TILE_ROWS, groups * GROUP)
