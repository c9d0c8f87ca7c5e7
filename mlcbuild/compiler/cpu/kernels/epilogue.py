"""Emits stores of the results of a matrix product in a row-major tensor of any width, with an
optional bias, and numbers the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.vectors import opaque, shuffle, span


class Stores(Protocol):
    """The interface of objects that emit stores of the results of a matrix product, to a tensor or in another
    form.
    """

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Emits the store of a vector of `lanes` results of a row, starting at `column`. Results beyond the
        end of the row are left out. first: True if they are complete or the first part of sums that are
        computed in parts of k; False for a later part, which is added to the stored results.
        """
        ...


@dataclass(frozen=True)
class Output:
    """The output of a matrix product: a float32 buffer [m, n] into which a kernel stores vectors of
    consecutive columns. The first column of a vector is a multiple of the vector's length.
    """

    buffer: Buffer
    n: int
    bias: Buffer | None
    step: int
    """Granularity, in columns, of the computed results: they are computed for columns up to the next multiple
    of this number, which is a multiple of the length of the stored vectors. Those beyond the output's n
    columns are dropped.
    """
    residual: bool
    """True if the product's results are added to the values that the output buffer already holds."""

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Emits the store of a vector of `lanes` results of a row; results beyond the end of the row are left
        out. first: True for complete sums or their first part along k, to which the bias is added; False for
        a later part, which is added to what is stored. With `residual`, the first part is added to what is
        stored, too."""
        if self.n % self.step == 0:
            self._put(row, column, values, lanes, first)
            return
        with T.If(column + lanes <= self.n):
            with T.Then():
                self._put(row, column, values, lanes, first)
            if self.n % lanes:
                with T.Else(), T.If(column < self.n), T.Then():
                    for lane in range(self.n % lanes):
                        self._put(row, column + lane, shuffle([values], [lane]), 1, first)

    def _put(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        place = span(column, lanes)
        if first and self.bias is not None:
            values = values + self.bias[place]
        if self.residual or not first:
            values = values + self.buffer[row, place]
        T.buffer_store(self.buffer, values, [row, place])


def rows_from(first: Expr, count: int, m: Expr) -> list[Expr]:
    """Returns the indices of `count` consecutive rows of a product of m rows, from `first` on; the last row's
    index replaces those beyond it. `once` emits code that skips such repeated rows.
    """
    return [opaque(T.min(first + i, m - 1)) for i in range(count)]


@contextmanager
def once(rows: Sequence[Expr], i: int) -> Iterator[None]:
    """Returns a context manager for code that a kernel executes for the i-th of some rows, whose indices
    `rows` ascend. The kernel skips this code if rows[i] equals rows[i - 1]: a repeated row only pads a batch,
    and its residual would be added twice.
    """
    if i == 0:
        yield
        return
    with T.If(rows[i] > rows[i - 1]), T.Then():
        yield
