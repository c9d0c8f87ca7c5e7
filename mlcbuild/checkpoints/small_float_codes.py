"""Reads matrices of 4-bit floats (E2M1), two in a byte, the first in the low bits, with a scale for each
group of columns.

A weight is the float times its group's scale. Scales are powers of two, one byte each (MXFP4), or 8-bit
floats together with one scale of the whole matrix (NVFP4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.bit_streams import Codes, unpacked
from mlcbuild.checkpoints.number_types import values_of
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import Floats, whole
from mlcbuild.quant.blocks import TWICE_E2M1, BlockRows

_TWICE = np.array(TWICE_E2M1, np.int8)
_HALVES = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Byte of a power-of-two scale (E8M0) -> half of the scale's value, exact in float32, to be multiplied by
codes that are decoded to twice their value. Byte 255 is not treated as NaN: such weights become infinite or
huge, and are refused where weights are stored."""


@dataclass(frozen=True)
class Fp4Matrix:
    """The stored tensors of one matrix of 4-bit floats, or of a stack of matrices whose rows follow each
    other.
    """

    packed: Tensor
    scale: Tensor
    columns: int
    group: int
    """Number of consecutive columns of the matrix that share a scale."""
    overall: Tensor | None = None
    """The tensor with the scale of the whole matrix (NVFP4); None if the scales of groups are powers of two
    (MXFP4).
    """
    divides: bool = False
    """True if the scales of groups of columns are divided by the scale of the whole matrix, False if they are
    multiplied by it.
    """

    def _codes(self, reader: RowReader, first: int, count: int) -> Codes:
        lines = self.columns // 2 // self.packed.shape[-1]
        raw = reader.elements(self.packed, (first * lines, (first + count) * lines))
        return unpacked(raw.reshape(count, -1), 4)

    def _scales(self, reader: RowReader, first: int, count: int) -> Floats:
        """Returns half of each scale in `count` rows of a matrix of 4-bit floats, from row `first` on:
        float32 [count, groups]. Scales of NVFP4 are multiplied or divided by the scale of the whole matrix,
        too. They are halved because codes are decoded to twice their value. Raises CheckpointError if the
        file cannot be read or is too short."""
        raw = reader.elements(self.scale, (first, first + count))
        if self.overall is None:
            return _HALVES.take(raw)
        scales, overall = values_of(raw, self.scale.dtype), whole(reader, self.overall).reshape(())
        with np.errstate(all="ignore"):  # Infinite weights are refused where weights are stored.
            if self.divides:
                scales /= overall
            else:
                scales *= overall
            scales *= np.float32(0.5)
        return scales

    def load(self, reader: RowReader, first: int, count: int) -> Floats:
        """Returns `count` rows of a matrix of 4-bit floats, from row `first` on, as float32 weights [count,
        columns]. reader: reads the checkpoint's files. Raises CheckpointError if one cannot be read or is too
        short."""
        rows: Floats = _TWICE.take(self._codes(reader, first, count)).astype(np.float32)
        groups = rows.reshape(count, -1, self.group)
        with np.errstate(all="ignore"):
            groups *= self._scales(reader, first, count)[:, :, None]
        return rows

    def unpack(self, reader: RowReader, first: int, count: int) -> BlockRows:
        """Returns `count` rows of the matrix from row `first` on, not dequantized: int8 codes [count,
        columns], which are twice the 4-bit floats, and half of each scale, float32 [count, groups of
        columns]; scales of NVFP4 include that of the whole matrix. Raises CheckpointError if the file cannot
        be read or is too short."""
        return BlockRows(_TWICE.take(self._codes(reader, first, count)), self._scales(reader, first, count))
