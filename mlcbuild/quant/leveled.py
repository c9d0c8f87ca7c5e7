"""Defines formats that quantize floating point weights with two-level scales: the product of a float16 shared
by 256 weights and an integer of each group.

Planning a build loads this module, so only the function that packs imports NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mlcbuild.quant import blocked
from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.format import Format, FormatTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.floats import Array, Scratch


def both(blocks: Blocks) -> dict[str, Format]:
    """Returns layout name ("x16" for tiles of 16 rows, "row" for row by row) -> the format that quantizes any
    float matrix and stores it in this layout. blocks: bits, groups, range and minima of the codes; its field
    `scale` must be "levels", which is not checked: a scale is the product of a float16 shared by 256 weights
    and an integer of each group."""
    return {layout: _quantizing(blocks, form) for layout, form in blocked.both(blocks).items()}


def _quantizing(blocks: Blocks, form: Format) -> Format:
    stored = blocks, form.tensors, form.rows_per_index
    return replace(
        form,
        pack=partial(_quantize, *stored),
        pack_blocks=None,
        pack_calibrated=partial(_calibrated, *stored),
    )


def _quantize(
    blocks: Blocks,
    tensors: Sequence[FormatTensor],
    rows_per_index: int,
    weight: Array,
    scratch: Scratch,
    name: str,
) -> Sequence[Array]:
    return _calibrated(blocks, tensors, rows_per_index, weight, None, name)


def _calibrated(
    blocks: Blocks,
    tensors: Sequence[FormatTensor],
    rows_per_index: int,
    weight: Array,
    importance: NDArray[np.float32] | None,
    name: str,
) -> Sequence[Array]:
    """Quantizes rows of a matrix [N, K], float32, float16, or bfloat16 bits in uint16, and returns the arrays
    to store, in the order and shapes of `tensors`. importance: factor of each column's squared error, float32
    [K]; None: all are 1. Raises CheckpointError, with `name` in its message, for weights that are infinite or
    NaN, or need a scale beyond float16."""
    from mlcbuild.quant import block_packing, level_search

    pack = block_packing.pack_rows if rows_per_index == 1 else block_packing.pack
    arrays = pack(blocks, level_search.quantize(blocks, weight, name, importance), name)
    shapes = [tensor.shape(*weight.shape) for tensor in tensors]
    return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]
