"""Where a product's results go: a row-major output, its width's tail, an optional bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.vectors import shuffle, span


class Stores(Protocol):
    """The target of a product's results."""

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Emits the store of `lanes` results of a row, of which those beyond its end are left out."""
        ...


@dataclass(frozen=True)
class Output:
    """float32 [m, n], stored in vectors whose columns start at multiples of their length."""

    buffer: Buffer
    n: int
    bias: Buffer | None
    step: int
    """Columns are visited up to the first multiple of this, a multiple of a vector's length, from n on."""
    residual: bool
    """Results are added to what the buffer holds before."""

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Write `lanes` results, or as many as the row has left. `first`: add the bias to them; otherwise
        they are a later part of the sums over K and are added to the first."""
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
        if first and self.bias is not None:
            values = values + self.bias[place]
        if self.residual or not first:
            values = values + self.buffer[row, place]
        T.buffer_store(self.buffer, values, [row, place])


@contextmanager
def once(rows: Sequence[Expr], i: int) -> Iterator[None]:
    """What is emitted inside runs unless row i repeats the row before it, as rows that fill up a batch do: a
    residual must not be added twice."""
    if i == 0:
        yield
        return
    with T.If(rows[i] > rows[i - 1]), T.Then():
        yield
