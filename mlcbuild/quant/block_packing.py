"""Packs and unpacks the formats that blocks.py describes, without changing any value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlcbuild.quant import row_packing
from mlcbuild.quant.blocks import BLOCK_WEIGHTS, BlockRows, Blocks
from mlcbuild.quant.floats import Array, not_finite
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE_ROWS

_LARGEST_SCALE = np.float32(2.0**120)
"""Largest scale that is accepted: products of larger ones with codes might be infinite. No published file
comes near."""


def pack(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> Sequence[Array]:
    """Packs consecutive rows, which may be of several types that the format holds, and returns the tensors
    that store them in tiles.

    Raises CheckpointError, naming `name`, when a scale or a minimum is infinite or NaN.
    """
    codes, *numbers = _joined(blocks, rows, name)
    dtypes = _number_dtypes(blocks)
    scales = [_in_tiles(field, dtype) for field, dtype in zip(numbers, dtypes, strict=True)]
    return _packed_codes(blocks, codes), *scales


def pack_rows(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> Sequence[Array]:
    """Packs the rows like `pack`, for the layout `row`, in which rows follow each other."""
    return row_packing.pack_blocks(blocks, _joined(blocks, rows, name))


def _joined(blocks: Blocks, rows: Sequence[BlockRows], name: str) -> list[NDArray[Any]]:
    """Checks quantized blocks of several rows against their format, and returns the fields (codes, scales,
    minima) of all rows, concatenated.
    """
    parts = [_conformed(blocks, part, name) for part in rows]
    return [np.concatenate(fields) if len(parts) > 1 else fields[0] for fields in zip(*parts, strict=True)]


def _number_dtypes(blocks: Blocks) -> list[DTypeLike]:
    levels: list[DTypeLike] = [np.uint8, np.float16]
    floats: list[DTypeLike] = [blocks.scale, np.float16]
    return levels * (1 + blocks.minimum) if blocks.scale == "levels" else floats[: 1 + blocks.minimum]


def _conformed(blocks: Blocks, rows: BlockRows, name: str) -> tuple[NDArray[Any], ...]:
    """Returns the codes as they are stored, one byte each, followed by the scales and minima of each row, in
    the order of the format's tensors. Raises CheckpointError, naming `name`, for infinite numbers and NaN.
    """
    codes = rows.codes.view(np.uint8) + np.uint8(blocks.zero)
    for number in (rows.scale, rows.minimum):
        if number is not None and not (np.abs(number) < _LARGEST_SCALE).all():
            raise not_finite(name)
    fields: list[NDArray[Any]] = []
    for number, steps in ((rows.scale, rows.steps), (rows.minimum, rows.minimum_steps))[: 1 + blocks.minimum]:
        # Adding -0 changes nothing, not even the sign of a zero.
        minima = np.full_like(rows.scale, -0.0) if number is None else number
        if blocks.scale != "levels":
            fields.append(np.repeat(minima, codes.shape[1] // GROUP // minima.shape[1], axis=1))
            continue
        count = codes.shape[1] // blocks.group
        steps_as_bytes = np.zeros((len(codes), count), np.uint8) if steps is None else steps.view(np.uint8)
        fields += [np.repeat(steps_as_bytes, count // steps_as_bytes.shape[1], axis=1), minima]
    return codes, *fields


def _whole_tiles(array: NDArray[Any]) -> NDArray[Any]:
    """Returns rows padded with zeros to whole tiles of 16 rows."""
    missing = -len(array) % TILE_ROWS
    return np.pad(array, ((0, missing), (0, 0))) if missing else array


def _in_tiles(numbers: NDArray[Any], dtype: DTypeLike) -> Array:
    """Returns the numbers [rows, count] in tiles: [tiles, runs, 16], or [tiles, groups, 16 * halves] when a
    group of 32 weights has two scales, which then lie side by side.
    """
    padded = _whole_tiles(numbers)
    return np.ascontiguousarray(padded.reshape(-1, TILE_ROWS, padded.shape[1]).swapaxes(1, 2)).astype(
        dtype, copy=False
    )


def _packed_codes(blocks: Blocks, codes: NDArray[np.uint8]) -> Array:
    """Returns the stored tensor q_weight [tiles, groups, 64 * bits] of codes [rows, columns]."""
    padded = np.ascontiguousarray(_whole_tiles(codes))
    groups = padded.shape[1] // GROUP
    words = padded.view(np.uint32).reshape(-1, TILE_ROWS, groups, QUADS).transpose(0, 2, 3, 1)
    words = np.ascontiguousarray(words)  # [tile, group, quad, row], a quad of codes in each
    if blocks.bits == 8:
        return words.view(np.uint8).reshape(*words.shape[:2], -1)
    half = QUADS // 2
    low = words & np.uint32(0x0F0F0F0F)
    lines = [low[:, :, :half] | low[:, :, half:] << np.uint32(4)]
    if blocks.bits > 4:
        high = words >> np.uint32(4) & np.uint32(0x03030303)
        lines += [line[:, :, None] for line in _high_bits(blocks.bits, high)]
    return np.concatenate(lines, axis=2).view(np.uint8).reshape(*words.shape[:2], -1)


def _high_bits(bits: int, high: NDArray[np.uint32]) -> Iterator[NDArray[np.uint32]]:
    """Yields the bytes that store the bits of each code above its low four. high: those bits, [tile, group,
    quad, row], where a quad is four consecutive weights.
    """
    width = bits - 4
    count = 8 // width
    for first in range(0, QUADS, count):
        line = np.zeros_like(high[:, :, 0])
        for place in range(count):
            line |= high[:, :, first + place] << np.uint32(width * place)
        yield line


def unpack(blocks: Blocks, tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Returns the matrix [N, K] of weights without padding: code * scale + minimum in float32, each operation
    rounded."""
    rows, columns = shape
    q_weight, *numbers = tensors
    padded = q_weight.shape[1] * GROUP
    codes = (_codes(blocks, q_weight) - np.uint8(blocks.zero)).view(np.int8 if blocks.signed else np.uint8)
    value = codes[:rows].astype(np.float32).reshape(rows, -1, blocks.group)
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
    """Returns the scales, or the minima, of each row and group as float32: [rows, columns / group]. tensors:
    the stored float16 or float32 tensor and, where scales have two levels, also the integer factors of
    groups, whose type is `steps`.
    """
    first = _by_rows(tensors[0])
    if len(tensors) == 1:
        return first.astype(np.float32)
    block = _by_rows(tensors[1]).astype(np.float32)
    block = np.repeat(block, BLOCK_WEIGHTS // blocks.group, axis=1)[:, : columns // blocks.group]
    wide: NDArray[np.float32] = block * first.view(steps)
    return wide


def _by_rows(tensor: Array) -> NDArray[Any]:
    """Returns a tensor stored in tiles in the order of matrix rows: the inverse of _in_tiles."""
    tiles = tensor.shape[0]
    rows_of_tiles = tensor.reshape(tiles, -1, TILE_ROWS).swapaxes(1, 2)
    return np.ascontiguousarray(rows_of_tiles).reshape(tiles * TILE_ROWS, -1)


def _codes(blocks: Blocks, q_weight: Array) -> NDArray[np.uint8]:
    """Returns the integer codes of a stored matrix, [rows rounded up to whole tiles, columns]."""
    tiles, groups, _ = q_weight.shape
    lines = np.ascontiguousarray(q_weight).view(np.uint8).reshape(tiles, groups, -1, TILE_ROWS, QUAD)
    quads = lines
    if blocks.bits < 8:
        half = QUADS // 2
        nibbles = lines[:, :, :half]
        quads = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
        width = blocks.bits - 4
        for quad in range(QUADS if width else 0):
            line, place = divmod(quad, 8 // width)
            quads[:, :, quad] |= (lines[:, :, half + line] >> width * place & (1 << width) - 1) << 4
    return np.ascontiguousarray(quads.transpose(0, 3, 1, 2, 4)).reshape(tiles * TILE_ROWS, groups * GROUP)
