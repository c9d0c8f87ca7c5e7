"""Where a product's results go: a row-major output, its width's tail, an optional bias."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels.vectors import shuffle, span


@dataclass(frozen=True)
class Output:
    """float32 [m, n], stored in vectors whose columns start at multiples of their length."""

    buffer: Buffer
    n: int
    bias: Buffer | None
    step: int
    """Columns are visited up to the first multiple of this, a multiple of a vector's length, from n on."""

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Write `lanes` results, or as many as the row has left. `first`: add the bias to them; otherwise
        they are a later part of the sums over K and are added to what is there."""
        if self.n % self.step == 0:
            self._put(row, column, values, lanes, first)
            return
        with T.If(column + lanes <= self.n):
            with T.Then():
                self._put(row, column, values, lanes, first)
            if self.n % lanes:
                with T.Else():
                    for lane in range(lanes):
                        with T.If(column + lane < self.n), T.Then():
                            self._put(row, column + lane, shuffle([values], [lane]), 1, first)

    def _put(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        place = span(column, lanes)
        if not first:
            values = values + self.buffer[row, place]
        elif self.bias is not None:
            values = values + self.bias[place]
        T.buffer_store(self.buffer, values, [row, place])
