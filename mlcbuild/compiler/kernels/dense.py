"""Matrices stored as they are: float32 or float16 [n, k]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.isa import ISA
from mlcbuild.compiler.kernels.vectors import argument, fetch_rows, i64, load_f32


@dataclass(frozen=True)
class DenseRows:
    """The RowFormat (see float_product) of a plain matrix: a block is one vector of consecutive values."""

    isa: ISA
    n: int
    k: int
    dtype: str

    planes = 1
    offset = 0.0

    @property
    def name(self) -> str:
        return "f32" if self.dtype == "float32" else "f16"

    @property
    def lanes(self) -> int:
        """The longest power of two that fits both a register and a row."""
        return min(self.isa.lanes, 1 << (self.k.bit_length() - 1))

    @property
    def blocks(self) -> int:
        return -(-self.k // self.lanes)

    @property
    def row_bytes(self) -> int:
        return self.k * (4 if self.dtype == "float32" else 2)

    def factor(self, plane: int) -> float:
        return 1.0

    def arguments(self) -> tuple[Buffer, ...]:
        return (argument("weight", (self.n, self.k), self.dtype),)

    def start(self, block: Expr) -> Expr:
        if self.k % self.lanes == 0:
            return block * self.lanes
        return T.min(block * self.lanes, i64(self.k - self.lanes))

    def load(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> tuple[Expr, ...]:
        return (T.bind(load_f32(self.isa, weights[0], (row, self.start(block)), self.lanes)),)

    def streamed(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        return loaded[plane]

    def scale(self, loaded: tuple[Expr, ...]) -> Expr | None:
        return None

    def unpacked(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        return loaded[plane]

    def fetch(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> None:
        fetch_rows(weights[0], row, block * self.lanes, self.row_bytes)
