"""Defines formats with one scale for each group of weights, stored by rows or by tiles: w = (q - zero) *
scale.

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
    """Returns the format in the layout row: q_weight uint32 [N, row_words(K)], q_scale [N, ceil(K/32)]. K is
    padded with zeros."""
    return _format(
        groups,
        FormatTensor("q_weight", "uint32", lambda n, k: (n, row_words(groups.bits, k))),
        FormatTensor("q_scale", groups.dtype, lambda n, k: (n, _group_count(k))),
        1,
    )


def tiles(groups: Groups) -> Format:
    """Returns the format in the layout x16, for products of 16 rows at a time.

    q_weight uint8 [ceil(N/16), ceil(K/32), 64 * bits], q_scale [ceil(N/16), ceil(K/32), 16]. For each tile
    and group there are bytes [quad][row of the tile][weight of the quad]; with 4 bits only for the quads of
    weights 0..15, and weights 16..31 are in the high halves of those bytes. With 5 bits the fifth ones come
    after that: bytes [row][weight of a quad], a bit for each quad. N and K are padded with zeros.
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
