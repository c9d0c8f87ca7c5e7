"""Reads matrices of integer codes that have a scale and a zero point, or a scale and a minimum, for each
group of columns of each row.

A weight is (code - zero) * scale, or code * scale + minimum, in float32, rounded after each operation. With
scales of 16 bits and a zero point no operation rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.shards import ComputedTensor, RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts
from mlcbuild.quant.blocks import BlockRows
from mlcbuild.quant.groups import GROUP

Read: TypeAlias = Callable[[RowReader, int, int], NDArray[Any]]
"""Function from (reader of the checkpoint's files, first row, number of rows) to these rows of a matrix's
codes [rows, columns], or of its scales, zero points or minima [rows, groups].
"""
_RANGES = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))
"""Triples (name of a GGUF tensor type whose weights are an integer times a float16, least integer, greatest
integer), the smallest type first."""
_WITH_MINIMUM = {2: "Q4_1", 3: "Q4_1", 4: "Q4_1", 5: "Q5_1", 6: "Q6_1"}
"""Bits of a code -> name of the tensor type whose weights are code * float16 scale + float16 minimum."""
_ROWS = 4096
"""Number of rows whose scales are examined at a time, to find a type that stores them unchanged."""


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix [rows, columns] of integer codes with a scale, and a zero point or a minimum, for each group
    of columns. All are read from the checkpoint row by row.
    """

    rows: int
    columns: int
    bits: int
    group: int
    """Number of consecutive columns of a matrix row that share a scale; the last such group may be shorter.
    Unused if `places` lists the group of each column."""
    codes: Read
    """Function from (reader of the checkpoint's files, first row, number of rows) to the integer codes of
    these rows of the matrix, uint8 [rows, columns].
    """
    scales: Read
    """Function from (reader of the checkpoint's files, first row, number of rows) to the scales of these rows
    of the matrix, float32 [rows, groups].
    """
    zeros: Read | None = None
    """Function from (reader of the checkpoint's files, first row, number of rows) to the zero points of these
    rows as integers, [rows, groups]; None: the matrix has no zero points, and its codes are multiplied as
    they are.
    """
    minima: Read | None = None
    """Function from (reader of the checkpoint's files, first row, number of rows) to the minima of these
    rows, float32 [rows, groups]; None: the matrix has none.
    """
    places: NDArray[np.intp] | None = field(default=None, compare=False)
    """Column of the matrix -> index of its group, if groups are not made of consecutive columns; None if they
    are.
    """
    kind: str = "F32"
    """Name of the tensor type, such as "Q4_0", in which the values of this matrix can be stored unchanged;
    "F32" if only float32 can hold them, and before the method `tensor` has determined the type."""

    def load(self, reader: RowReader, first: int, count: int) -> Floats:
        """Returns `count` rows of the matrix from row `first` on, as float32 weights [count, columns].
        reader: reads the checkpoint's files.
        """
        rows: Floats = self.codes(reader, first, count).astype(np.float32)
        if self.zeros is not None:
            rows -= self._spread(self.zeros(reader, first, count).astype(np.float32))
        with np.errstate(all="ignore"):  # Infinite weights are refused where weights are stored.
            rows *= self._spread(self.scales(reader, first, count))
            if self.minima is not None:
                rows += self._spread(self.minima(reader, first, count))
        return rows

    def _spread(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Returns a number of each group, such as its scale, repeated for the group's columns: [rows, groups]
        -> [rows, columns], or [rows, 1] unchanged if there is one group."""
        if self.places is not None:
            return numbers[:, self.places]
        if numbers.shape[1] == 1:
            return numbers
        return np.repeat(numbers, self.group, axis=1)[:, : self.columns]

    def unpack(self, reader: RowReader, first: int, count: int) -> BlockRows:
        """Returns `count` rows of the matrix from row `first` on, not dequantized, as a BlockRows: integer
        codes [count, columns], int8 or uint8, and a float32 scale, and a minimum if there are minima, for
        every 32 columns. Zero points are subtracted from the codes, or become minima. The caller must check
        that the attribute `kind` is not "F32". reader: reads the checkpoint's files."""
        codes, scale = self.codes(reader, first, count), self.scales(reader, first, count)
        minimum = None if self.minima is None else self.minima(reader, first, count)
        if self.zeros is not None:
            zeros = self.zeros(reader, first, count)
            if self.kind.endswith("_0"):
                codes = (codes.astype(np.int16) - self._spread(zeros)).astype(np.int8)
            else:
                minimum = -(zeros * scale).astype(np.float32)
        return BlockRows(codes, self._by_block(scale), None, self._by_block(minimum))

    def _by_block(self, numbers: Any) -> Any:
        if numbers is None:
            return None
        if numbers.shape[1] == 1:
            return np.repeat(numbers, self.columns // GROUP, axis=1)
        return np.repeat(numbers, self.group // GROUP, axis=1)[:, : self.columns // GROUP]

    def tensor(self, parts: StoredParts, note: str = "", name: str = "weight") -> ComputedTensor:
        """Returns a matrix of integer codes as one tensor of float32 weights, whose rows are computed when
        they are read. parts: the stored tensors of the matrix's module (one projection of a layer); name:
        name of the new tensor within the module; note: a remark for the log, or "". Scales, zero points and
        minima are read now, to determine the tensor type that holds the weights unchanged; CheckpointError is
        raised if that fails.
        """
        matrix = replace(self, kind=self._kind())
        unpack = None if matrix.kind == "F32" else matrix.unpack
        return parts.computed((self.rows, self.columns), matrix.load, matrix.kind, unpack, note, name)

    def _kind(self) -> str:
        aligned = self.group % GROUP == 0 or self.group >= self.columns
        if self.places is not None or self.columns % GROUP or not aligned:
            return "F32"
        with Rows() as reader:
            spans = [(first, min(_ROWS, self.rows - first)) for first in range(0, self.rows, _ROWS)]
            if not all(is_half(self.scales(reader, *span)) for span in spans):
                return "F32"
            if self.minima is not None:
                exact = all(is_half(self.minima(reader, *span)) for span in spans)
                return _WITH_MINIMUM.get(self.bits, "F32") if exact else "F32"
            low, high, minima = 0, (1 << self.bits) - 1, False
            if self.zeros is not None:
                zeros = [self.zeros(reader, *span) for span in spans]
                low = -max(int(zero.max()) for zero in zeros)
                high -= min(int(zero.min()) for zero in zeros)
                minima = all(
                    is_half(zero * self.scales(reader, *span))
                    for zero, span in zip(zeros, spans, strict=True)
                )
        fitting = [name for name, least, greatest in _RANGES if least <= low and high <= greatest]
        if minima and self.bits <= 4 and fitting[:1] != ["Q4_0"]:
            return "Q4_1"
        return fitting[0] if fitting else "F32"


def is_half(numbers: NDArray[Any]) -> bool:
    """Returns True if every one of the numbers is finite and exactly representable as float16."""
    with np.errstate(all="ignore"):
        half = numbers.astype(np.float16)
    return bool(np.isfinite(half).all() and (half == numbers).all())
