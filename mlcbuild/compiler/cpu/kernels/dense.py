"""Emits reads of matrices that are stored unquantized, as float32 or float16 [n, k]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.vectors import argument, fetch_rows, i64, load_f32


@dataclass(frozen=True)
class DenseRows:
    """Emits reads of the rows of an unquantized float32 or float16 matrix [n, k] in blocks; an implementation
    of RowFormat in float_product.py. A block is 1, 2 or 4 vectors of consecutive values: the largest of these
    numbers that divides a row. If none does, it is one vector, and the last block of a row starts early and
    overlaps the one before it.
    """

    isa: ISA
    n: int
    k: int
    dtype: str

    offset = 0.0
    lane_step = 1

    @property
    def name(self) -> str:
        return "f32" if self.dtype == "float32" else "f16"

    @property
    def lanes(self) -> int:
        """Returns the number of values in a vector: that of a vector register or, if a row of the matrix has
        fewer values, the largest power of two that does not exceed their number.
        """
        return min(self.isa.lanes, 1 << (self.k.bit_length() - 1))

    @property
    def planes(self) -> int:
        return next(planes for planes in (4, 2, 1) if planes == 1 or self.k % (planes * self.lanes) == 0)

    @property
    def plane_step(self) -> int:
        return self.lanes

    @property
    def blocks(self) -> int:
        return -(-self.k // (self.planes * self.lanes))

    @property
    def row_bytes(self) -> int:
        return self.k * (4 if self.dtype == "float32" else 2)

    def factor(self, plane: int) -> float:
        return 1.0

    def arguments(self) -> tuple[Buffer, ...]:
        return (argument("weight", (self.n, self.k), self.dtype),)

    def stacked(self, count: int) -> DenseRows:
        """Returns a DenseRows, by which kernels read rows, for `count` unquantized matrices [n, k] of the
        same type that are stored one after the other as one matrix [count * n, k].
        """
        return replace(self, n=count * self.n)

    def start(self, block: Expr) -> Expr:
        if self.k % self.lanes == 0:
            return block * (self.planes * self.lanes)
        return T.min(block * self.lanes, i64(self.k - self.lanes))

    def load(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> tuple[Expr, ...]:
        places = [(row, self.start(block) + plane * self.lanes) for plane in range(self.planes)]
        return tuple(load_f32(self.isa, weights[0], place, self.lanes) for place in places)

    def streamed(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        return loaded[plane]

    def scale(self, loaded: tuple[Expr, ...]) -> Expr | None:
        return None

    def unpacked(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        return loaded[plane]

    def fetch(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> None:
        values = self.planes * self.lanes
        line = 64 * self.k // self.row_bytes
        for first in range(0, values, line):
            fetch_rows(weights[0], row, block * values + first, self.row_bytes)
