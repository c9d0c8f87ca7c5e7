"""Describes one product with 3- to 8-bit weights in the x16 layout to the code paths that emit it, and emits
loads of its weights and its float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.epilogue import Stores
from mlcbuild.compiler.cpu.kernels.int8_group import Column
from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.compiler.cpu.kernels.vectors import Register, register, span, splat, typed
from mlcbuild.quant.groups import QUAD, QUADS, TILE_ROWS


@dataclass(frozen=True)
class Int8Call:
    """The matrix, weights, rows of x and output of one int8 product, which all of its code paths share while
    its kernel is emitted."""

    matrix: TiledMatrix
    weights: tuple[Buffer, ...]
    """The tensors that store the weight matrix, in the order in which its format lists them: codes, scales,
    and minima if it has them; two-level scales and minima are two tensors each.
    """
    output: Stores
    ready: Callable[[Expr], tuple[Buffer, Expr]]
    """Function of the index of a row of x that emits the code which computes this row, and returns (buffer
    that holds it as float32, index of its row there).
    """
    records: Buffer
    m: Expr
    first: Expr | None = None
    """Index of the first tile, in the stored tensors, of the matrix to multiply, if they hold several
    matrices, one after the other; None if they hold one matrix."""

    @property
    def isa(self) -> ISA:
        return self.matrix.isa

    def operands(self, tile: Expr, group: Expr, vector: int, paired: bool) -> list[list[Expr]]:
        """Emits loads of weights in a group of 32 columns, and returns `operands` of a Column: the int32
        vectors for each quad (four consecutive columns), or for two quads if `paired` (products of two rows
        of x at a time), with which dot-product instructions multiply. vector: index of the vector of rows
        among those that cover a tile's 16 rows."""
        form = self.matrix.dot
        count = QUADS // form.fields
        high = [T.bind(self.packed(tile, group, count + i, vector)) for i in range(form.high_lines)]
        by_line = [form.operands(j, self.packed(tile, group, j, vector), high) for j in range(count)]
        quads = [by_line[quad % count][quad // count] for quad in range(QUADS)]
        return form.paired(quads) if paired else quads

    def packed(self, tile: Expr, group: Expr, j: Expr | int, vector: int) -> Expr:
        """Emits a load of packed weight codes in a group of 32 columns, and returns them as int32 lanes, one
        for each weight row. A lane holds the bytes 4 * j to 4 * j + 3 of its row's codes in the group.
        vector: index of the vector of rows among those that cover a tile's 16 rows."""
        lanes = self.isa.lanes
        raw = self.weights[0][
            self.stored(tile), group, span(j * QUAD * TILE_ROWS + vector * lanes * QUAD, QUAD * lanes)
        ]
        return T.reinterpret(typed("int32", lanes), raw)

    def column(self, tile: Expr, group: Expr, vector: int, paired: bool) -> Column:
        """Emits loads of weights in a group of 32 columns, and returns them as a Column: operands of dot
        products, scales and minima. vector: index of the vector of rows among those that cover a tile's 16
        rows; paired: True for products of two rows of x at a time."""
        return Column(self.operands(tile, group, vector, paired), *self.numbers(tile, group, vector))

    def numbers(self, tile: Expr, group: Expr, vector: int) -> tuple[list[Expr], list[Expr]]:
        """Emits loads of the scales and minima of weight rows in a group of 32 columns, and returns (scales,
        minima). Each list has two float32 vectors, with a lane for each row, if the halves of the group have
        separate scales, else one; minima is [] for weights without minima. vector: index of the vector of
        rows in the tile.
        """
        matrix, halves = self.matrix, range(self.matrix.records.halves)
        place = self.stored(tile), group, vector
        scales = [matrix.scales(self.weights, place, half) for half in halves]
        minima = [matrix.minima(self.weights, place, half) for half in halves] if matrix.records.sums else []
        return scales, minima

    def stored(self, tile: Expr) -> Expr:
        """Returns the index, in the stored tensors, of the tile with index `tile` in the matrix to multiply.
        The two differ if the tensors hold several matrices, one after the other.
        """
        return tile if self.first is None else self.first + tile


def sums(call: Int8Call, rows: Sequence[Expr], vectors: int) -> list[list[Register]]:
    """Emits the float32 accumulators for products of rows of x with weight rows, and returns them as
    [row][vector]. They start at 0; with power-of-two scales of activations, at NaN for a row with a NaN or a
    value above 127 * 2**104. rows: indices of the rows of x; vectors: number of vectors, each with one weight
    row per lane."""
    lanes, records = call.isa.lanes, call.matrix.records
    starts = [T.bind(splat(records.start(call.records, row), lanes)) for row in rows]
    return [[register(start, lanes) for _ in range(vectors)] for start in starts]
