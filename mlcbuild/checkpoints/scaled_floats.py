"""Reads matrices of 8-bit floats with one scale for the whole matrix, for each row, or for each block of rows
and columns.

A weight is the product of the float and its scale, rounded once to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.number_types import READABLE, SMALL_FLOATS
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.shards import ComputedTensor, RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, whole
from mlcbuild.quant.blocks import BlockRows
from mlcbuild.quant.groups import GROUP

FLOATS = tuple(name for name in SMALL_FLOATS if name != "F8_E8M0")
"""Names, in safetensors, of the 8-bit float dtypes that weights may have."""
_BLOCK = (128, 128)
"""Rows and columns of a block of weights that share a scale, where quantization_config states no size;
DeepSeek and Qwen use these."""
_KEPT = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
"""Name of an 8-bit float dtype in safetensors -> the type, in the terms of quant/as_is.py, whose format keeps
the floats and their scales."""
_HALF_EXPONENTS = {"F8_E4M3": (-15, 7), "F8_E5M2": (-8, 0)}
"""Name of an 8-bit float dtype in safetensors -> the least and the greatest exponent of a power-of-two scale
with which the product of the scale and any such float is a float16."""


@dataclass(frozen=True)
class _Scaled:
    """The stored tensors of one scaled matrix of 8-bit floats, and the size of its blocks."""

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]
    """Number of rows, and number of columns, of a block whose weights share a scale."""

    @property
    def groups_align(self) -> bool:
        """Returns True if each group of 32 columns shares a scale, and rows are whole groups."""
        return self.weight.shape[1] % GROUP == 0 and self.block[1] % GROUP == 0

    def load(self, reader: RowReader, first: int, count: int) -> Floats:
        rows = reader.values(self.weight, first, count)
        rows *= self._scales(reader, first, count, 1)
        return rows

    def unpack(self, reader: RowReader, first: int, count: int) -> BlockRows:
        codes = reader.elements(self.weight, (first, first + count))
        return BlockRows(codes, np.ascontiguousarray(self._scales(reader, first, count, GROUP)))

    def _scales(self, reader: RowReader, first: int, count: int, each: int) -> Floats:
        """Returns the scales of `count` rows from row `first` on, float32 [count, columns / each]: one for
        each run of `each` columns, all of which share it."""
        high, wide = self.block
        grid = tuple(-(-size // length) for size, length in zip(self.weight.shape, self.block, strict=True))
        low, last = first // high, (first + count - 1) // high + 1
        scales = _scale_rows(reader, self.scale, grid, low, last)
        row_scales = scales[np.arange(first, first + count) // high - low]
        runs = self.weight.shape[1] // each
        if row_scales.shape[1] == 1:
            return np.broadcast_to(row_scales, (count, runs))
        return np.repeat(row_scales, wide // each, axis=1)[:, :runs]


def _scale_rows(reader: RowReader, scale: Tensor, grid: tuple[int, ...], first: int, last: int) -> Floats:
    """Returns rows first..last-1 of a tensor that holds one scale for each block of a matrix, as float32
    [last - first, blocks along a row]. grid: (number of blocks from top to bottom of the matrix, number of
    blocks along a row)."""
    if grid == (1, 1):
        return whole(reader, scale).reshape(1, 1)
    return reader.values(scale, first, last - first).reshape(-1, grid[1])


def scaled(parts: StoredParts, scale: str, block: object = None) -> ComputedTensor:
    """Returns the weight matrix of a module: 8-bit floats multiplied by the scales in the module's stored
    tensor `scale`, such as "weight_scale". Its float32 rows are computed when they are read; the scales are
    also read at once, to choose its type.

    The shape of the scales tells whether one counts for the whole matrix, for a row, or for a block of
    weights. block: the rows and columns of a block, as quantization_config states them; None if it does not:
    128 and 128. Raises CheckpointError if a tensor is missing, unreadable, or has another type or shape, or
    `block` is not two positive integers."""
    rows, columns = parts.matrix("weight")
    weight = parts["weight"]
    if weight.dtype not in FLOATS:
        raise parts.fault(f"has a weight of {weight.dtype} and a {scale}; it must be {' or '.join(FLOATS)}")
    tensor = parts[scale]
    if tensor.dtype not in READABLE:
        raise parts.fault(f"has a {scale} of {tensor.dtype}; it must be {', '.join(READABLE)}")
    sizes = _block_sizes(parts, rows, columns, block)
    block_size = next((size for size, shapes in sizes if tensor.shape in shapes), None)
    if block_size is None:
        listed = " or ".join(str(list(shapes[0])) for _, shapes in sizes)
        raise parts.fault(
            f"must have a {scale} of {listed} for its weight {[rows, columns]}, found {list(tensor.shape)}"
        )
    matrix = _Scaled(weight, tensor, block_size)
    kind = _kind(matrix)
    unpack = matrix.unpack if kind in _KEPT.values() else None
    return parts.computed((rows, columns), matrix.load, kind, unpack)


def _block_sizes(
    parts: StoredParts, rows: int, columns: int, block: object
) -> list[tuple[tuple[int, int], list[tuple[int, ...]]]]:
    """Returns the possible sizes of the blocks of weights that share a scale, preferred ones first, each as
    ((rows, columns) of a block, list of the shapes that the tensor of scales may then have). rows, columns:
    shape of the matrix; block: the size of blocks that quantization_config states, or None. Raises
    CheckpointError if it is not two positive integers.
    """
    match block:
        case None:
            high, wide = _BLOCK
        case [int(high), int(wide)] if high > 0 and wide > 0:
            pass
        case _:
            raise parts.fault(f"has blocks of {str(block)[:40]}; weight_block_size must be two sizes")
    grid = (-(-rows // high), -(-columns // wide))
    by_block: tuple[tuple[int, int], list[tuple[int, ...]]] = ((high, wide), [grid])
    others: list[tuple[tuple[int, int], list[tuple[int, ...]]]] = [
        ((rows, columns), [(1,), (), (1, 1)]),
        ((1, columns), [(rows, 1), (rows,)]),
    ]
    return [by_block, *others] if block is not None else [*others, by_block]


def _kind(matrix: _Scaled) -> str:
    """Returns the name of a type that stores all weights of a matrix of scaled 8-bit floats unchanged: "E4M3"
    or "E5M2" if groups of 32 columns share a scale; else "F16" if each scale (they are read) is a power of
    two in the range that keeps weights float16 numbers; else "F32". Raises CheckpointError if the file cannot
    be read or is too short."""
    if matrix.groups_align and matrix.weight.dtype in _KEPT:
        return _KEPT[matrix.weight.dtype]
    limits = _HALF_EXPONENTS.get(matrix.weight.dtype)
    if limits is None:
        return "F32"
    with Rows() as reader:
        fraction, exponent = np.frexp(whole(reader, matrix.scale))
    low, high = limits
    exact = (fraction == 0.5) & (exponent > low) & (exponent <= high + 1)
    return "F16" if exact.all() else "F32"
