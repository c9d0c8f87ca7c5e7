"""Defines formats with one scale for each group of 32 weights, w = (code - zero) * scale, stored by rows or
by tiles of 16 rows.

Planning a build loads this module, so only the functions that pack import NumPy; they are in packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mlcbuild.quant.format import ITEM_BYTES, Format, FormatTensor
from mlcbuild.quant.groups import GROUP, TILE_ROWS, Groups, row_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.floats import Array, Scratch


def _group_count(columns: int) -> int:
    return -(-columns // GROUP)


def rows(groups: Groups) -> Format:
    """Returns the format that stores a matrix [N, K] row by row (the layout `row`). q_weight is uint32 [N,
    words]: codes of 4 or 8 bits fill a row's words from their low ends; with 5 bits the low four of all codes
    come first, then the fifth ones; rows are padded to a multiple of four words. q_scale is [N, ceil(K/32)].
    K is padded with zeros to a multiple of 32. groups: bits of codes and type of scales."""
    return _format(
        groups,
        FormatTensor("q_weight", "uint32", lambda n, k: (n, row_words(groups.bits, k))),
        FormatTensor("q_scale", groups.dtype, lambda n, k: (n, _group_count(k))),
        1,
    )


def tiles(groups: Groups) -> Format:
    """Returns the format that stores a matrix [N, K] in tiles of 16 rows and 32 columns (the layout x16), for
    products of 16 rows at a time. N and K are padded with zeros to whole tiles. groups: bits of codes and
    type of scales.

    q_weight uint8 [ceil(N/16), ceil(K/32), 64 * bits] holds the codes and q_scale [ceil(N/16), ceil(K/32),
    16] the scales. The bytes of a tile are ordered [quad][row][weight of the quad], a quad being four
    consecutive weights. With 8 bits there are eight quads. With 4 and 5 bits there are four: low halves of
    bytes belong to weights 0..15, high halves to 16..31. With 5 bits, bytes [row][weight of a quad] with the
    fifth bits follow; bit q belongs to quad q of the 32 weights.
    """
    size = GROUP * TILE_ROWS * groups.bits // 8
    return _format(
        groups,
        FormatTensor("q_weight", "uint8", lambda n, k: (-(-n // TILE_ROWS), _group_count(k), size)),
        FormatTensor("q_scale", groups.dtype, lambda n, k: (-(-n // TILE_ROWS), _group_count(k), TILE_ROWS)),
        TILE_ROWS,
    )


def _format(groups: Groups, codes: FormatTensor, scales: FormatTensor, rows_per_index: int) -> Format:
    tensors = codes, scales
    return Format(
        tensors,
        partial(_pack, groups, tensors, rows_per_index),
        partial(_unpack, groups, rows_per_index),
        groups.bits + 8 * ITEM_BYTES[groups.dtype] / GROUP,
        groups.bits,
        GROUP,
        groups.dtype,
        rows_per_index,
    )


def _pack(
    groups: Groups,
    tensors: Sequence[FormatTensor],
    tile: int,
    weight: Array,
    scratch: Scratch,
    name: str,
) -> Sequence[Array]:
    from mlcbuild.quant.packing import Packer

    rows, columns = weight.shape
    q_weight, q_scale = (scratch.array(t.suffix, t.shape(rows, columns), t.dtype) for t in tensors)
    Packer(groups, tile, columns, scratch, name).pack(weight, q_weight, q_scale)
    return q_weight, q_scale


def _unpack(
    groups: Groups, tile: int, tensors: Sequence[Array], shape: tuple[int, int]
) -> NDArray[np.float32]:
    from mlcbuild.quant import packing

    unpack = packing.unpack_rows if tile == 1 else packing.unpack_tiles
    return unpack(groups, tensors, shape)
