"""Defines formats that store the codes, scales and minima of quantized checkpoints unchanged, by rows or in
tiles of 16 rows.

Planning a build loads this module, so only the functions that pack import NumPy; they are in
block_packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mlcbuild.quant.blocks import BLOCK_WEIGHTS, BlockRows, Blocks
from mlcbuild.quant.format import ITEM_BYTES, Format, FormatTensor
from mlcbuild.quant.groups import GROUP, TILE_ROWS, row_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.floats import Array, Scratch


def tiles(blocks: Blocks) -> Format:
    """Returns the format that stores codes, scales and minima in tiles of 16 rows and groups of 32 columns
    (the layout x16). The number of columns is a multiple of 32, or of 256 with two-level scales.

    q_weight is uint8 [tiles, groups, 64 * bits]. Each tile's group has `bits` lines of 64 bytes [row][weight
    of a quad]; quads 0..7 are four consecutive columns each. With 8 bits, line j holds quad j. With 4 to 6
    bits, line j of four holds the low four bits of quad j, and above them those of quad 4 + j; with 3 bits,
    line j of two holds the low two bits of quads j, 2 + j, 4 + j and 6 + j. The high bits follow: one bit of
    each quad in one line, or two bits of quads 0..3 in a line and of 4..7 in another, the first quad in the
    lowest bits.

    q_scale is [tiles, groups, 16], or [tiles, groups, 32] if scales belong to 16 columns (those of the first
    16 columns come first). With two-level scales it is uint8, the bits of int8 factors, and q_block is
    float16 [tiles, blocks of 256 columns, 16]. q_min and q_block_min, if there are minima, have the same
    shapes; factors of minima are uint8, other minima float16.
    """
    return _format(blocks, tuple(_tensors(blocks)), TILE_ROWS, _bits_per_weight(blocks))


def rows(blocks: Blocks) -> Format:
    """Returns the format that stores codes, scales and minima row by row (the layout `row`). The number of
    columns is a multiple of 32, or of 256 with two-level scales.

    q_weight is uint32 [N, words]: the low four bits of a row's codes, eight to a word from its low end, or
    with 3 bits the low two, sixteen to a word; then their high bits in the same way; then zeros up to a
    multiple of 4 words. Codes of 8 bits lie four to a word. q_scale is [N, groups] of the type of the scales;
    with minima it is uint32, the scale's float16 in the low half and the minimum's in the high one. With
    two-level scales it is uint32 [N, blocks * words]: for each block of 256 columns its float16 numbers in
    one word, in these halves, then a byte for each scale, then one for each minimum.
    """
    words = 1 + BLOCK_WEIGHTS // blocks.group // 4 * (1 + blocks.minimum)
    dtype = "uint32" if blocks.minimum or blocks.scale == "levels" else blocks.scale
    levels = blocks.scale == "levels"
    tensors = (
        FormatTensor("q_weight", "uint32", lambda n, k: (n, row_words(blocks.bits, k))),
        FormatTensor(
            "q_scale",
            dtype,
            lambda n, k: (n, -(-k // BLOCK_WEIGHTS) * words if levels else -(-k // GROUP) * blocks.halves),
        ),
    )
    bits = 32 * words / BLOCK_WEIGHTS if levels else 8 * ITEM_BYTES[dtype] / blocks.group
    return _format(blocks, tensors, 1, blocks.bits + bits)


def _format(
    blocks: Blocks, tensors: tuple[FormatTensor, ...], rows_per_index: int, bits_per_weight: float
) -> Format:
    return Format(
        tensors,
        _refuse,
        partial(_unpack, blocks, rows_per_index),
        bits_per_weight,
        blocks.bits,
        blocks.group,
        "float16",
        rows_per_index,
        blocks,
        partial(_pack_blocks, blocks, rows_per_index),
    )


def both(blocks: Blocks) -> dict[str, Format]:
    """Returns layout name -> the format that stores a matrix of codes, scales and minima of the types in
    `blocks`: "x16" in tiles of 16 rows, "row" row by row."""
    return {"x16": tiles(blocks), "row": rows(blocks)}


def _tensors(blocks: Blocks) -> Iterator[FormatTensor]:
    size = GROUP * TILE_ROWS * blocks.bits // 8
    levels = blocks.scale == "levels"
    dtype, width = "uint8" if levels else blocks.scale, TILE_ROWS * blocks.halves

    def per_group(width: int) -> partial[tuple[int, ...]]:
        return partial(_shape, GROUP, width)

    yield FormatTensor("q_weight", "uint8", per_group(size))
    for name in ("scale", "min") if blocks.minimum else ("scale",):
        number_type = dtype if levels or name == "scale" else "float16"
        yield FormatTensor(f"q_{name}", number_type, per_group(width))
        if levels:
            block = "q_block" if name == "scale" else "q_block_min"
            yield FormatTensor(block, "float16", partial(_shape, BLOCK_WEIGHTS, TILE_ROWS))


def _shape(weights: int, width: int, rows: int, columns: int) -> tuple[int, ...]:
    """Returns the shape of a stored tensor that has `width` numbers for each tile of 16 rows and each run of
    `weights` columns: (tiles, runs, width). rows, columns: the matrix's size."""
    return -(-rows // TILE_ROWS), -(-columns // weights), width


def _bits_per_weight(blocks: Blocks) -> float:
    numbers = 1 + blocks.minimum
    if blocks.scale == "levels":
        return blocks.bits + numbers * (8 / blocks.group + 16 / BLOCK_WEIGHTS)
    return blocks.bits + 8 * (ITEM_BYTES[blocks.scale] + 2 * blocks.minimum) / blocks.group


def _refuse(weight: Array, scratch: Scratch, name: str) -> Sequence[Array]:
    from mlcbuild.errors import CheckpointError

    raise CheckpointError(
        f"{name}: it is not quantized, and this format only keeps the values of quantized tensors; the "
        "checkpoint changed since the recipe was read, so run again"
    )


def _pack_blocks(
    blocks: Blocks, rows_per_index: int, rows: Sequence[BlockRows], name: str
) -> Sequence[Array]:
    from mlcbuild.quant import block_packing

    pack = block_packing.pack_rows if rows_per_index == 1 else block_packing.pack
    return pack(blocks, rows, name)


def _unpack(
    blocks: Blocks, rows_per_index: int, tensors: Sequence[Array], shape: tuple[int, int]
) -> NDArray[np.float32]:
    from mlcbuild.quant import block_packing, row_packing

    unpack = row_packing.unpack_blocks if rows_per_index == 1 else block_packing.unpack
    return unpack(blocks, tensors, shape)
