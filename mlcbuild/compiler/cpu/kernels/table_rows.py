"""Emits code that copies one row of a stored embedding table as float32. There is one function for each
layout: unquantized, quantized row by row, in tiles of 16 rows, or in a format of float32 products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.dot import looked_up
from mlcbuild.compiler.cpu.kernels.float_product import RowFormat
from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, i64, load_f32, shuffle, span, splat, typed
from mlcbuild.quant import Storage
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE_ROWS, low_bits


@dataclass(frozen=True)
class TableRow:
    """One row of a stored embedding table, and the row of the float32 output to which it is copied."""

    isa: ISA
    hidden: int
    """Number of columns of the embedding table, which is the model's hidden size."""
    scheme: Storage
    weights: tuple[Buffer, ...]
    out: Buffer
    token: Expr
    row: Expr

    @property
    def bits(self) -> int:
        """Returns the number of bits of a stored code of the embedding table; 0 if it holds floating point
        numbers.
        """
        return self.scheme.bits

    def write(self, column: Expr, values: Expr, lanes: int) -> None:
        """Emits the store of `lanes` float32 values of a row of an embedding table into the output row, from
        column `column` on. Values beyond the table's last column, which pad its last group of 32, are left
        out.
        """
        if self.hidden % GROUP == 0:
            T.buffer_store(self.out, values, [self.row, span(column, lanes)])
            return
        for lane in range(lanes):
            with T.If(column + lane < self.hidden), T.Then():
                value = shuffle([values], [lane]) if lanes > 1 else values
                T.buffer_store(self.out, value, [self.row, column + lane])


def copy_plain(lookup: TableRow) -> None:
    """Emits the copy of a row of an unquantized embedding table, converted to float32, into the output row,
    value by value.
    """
    with T.serial(0, i64(lookup.hidden)) as k:
        T.buffer_store(
            lookup.out, load_f32(lookup.isa, lookup.weights[0], (lookup.token, k), 1), [lookup.row, k]
        )


def copy_grouped_row(lookup: TableRow) -> None:
    """Emits code that dequantizes one row of an embedding table, 4- or 8-bit codes and their scales stored
    row by row, into a row of the float32 output: (code - offset) * scale with offset 7 (4 bits) or 127 (8
    bits). Each uint32 word of 8 or 4 codes becomes one vector.
    """
    words, scales = lookup.weights
    bits = lookup.bits
    lanes = 32 // bits
    offset = 2 ** (bits - 1) - 1
    shifts = T.ramp(T.int32(0), T.int32(bits), lanes)
    with T.serial(0, words.shape[1]) as word:
        spread = splat(T.reinterpret("int32", words[lookup.token, word]), lanes)
        values = ((spread >> shifts) & i32(2**bits - 1, lanes)) - i32(offset, lanes)
        scale = load_f32(lookup.isa, scales, (lookup.token, word // bits), 1)
        lookup.write(word * lanes, T.Cast(typed("float32", lanes), values) * splat(scale, lanes), lanes)


def copy_tiled_row(lookup: TableRow) -> None:
    """Emits code that dequantizes one row of an embedding table in the x16 layout (tiles of 16 rows, groups
    of 32 columns) into a row of the float32 output: (code - zero) * scale, plus the minimum if the format has
    minima.

    A group of a tile is stored in lines that hold four bytes of each row, one for each value of a quad (four
    consecutive values). With 8 bits, line j holds quad j. With 4 to 6 bits, line j holds the low four bits of
    quad j and, in the high halves of its bytes, those of quad j + 4; with 3 bits, the low two bits of quads
    j, j + 2, j + 4 and j + 6. The bits above follow: one line, in which bit q of a byte belongs to quad q,
    or, with 6 bits, two, with two bits for each of four quads.
    """
    matrix = TiledMatrix(lookup.isa, lookup.scheme, 1, lookup.hidden)
    width, fields = low_bits(lookup.bits), matrix.dot.fields
    lines = QUADS // fields
    words = lookup.weights[0]
    tile, r = lookup.token // TILE_ROWS, lookup.token % TILE_ROWS
    shifts = T.ramp(T.int32(0), T.int32(8), QUAD)

    def quad(group: Expr, line: Expr | int) -> Expr:
        line_bytes = words[tile, group, T.ramp(line * (TILE_ROWS * QUAD) + r * QUAD, 1, QUAD)]
        return T.bind(splat(T.reinterpret("int32", line_bytes), QUAD))

    with T.serial(0, words.shape[1]) as group:
        scales, minima = matrix.row_numbers(lookup.weights, (tile, group, r))
        above = [quad(group, lines + i) for i in range(matrix.dot.high_lines)]
        with T.serial(0, i64(lines)) as j:
            spread = quad(group, j)
            for part in range(fields):
                field = (spread >> (shifts + i32(width * part, QUAD))) & i32(2**width - 1, QUAD)
                if above:
                    count = len(above)
                    line, first = divmod(part * lines * count, 8)
                    place = T.Cast("int32", j) * count + first
                    bit = (above[line] >> (shifts + splat(place, QUAD))) & i32(2**count - 1, QUAD)
                    field = field | (bit << i32(width, QUAD))
                if matrix.blocks is not None and matrix.blocks.table is not None:
                    field = looked_up(T.bind(field), matrix.blocks.table, "int32", QUAD)
                values = T.Cast("float32x4", field - i32(matrix.zero, QUAD))
                column = group * GROUP + part * lines * QUAD + j * QUAD
                # With 8 bits the loop over quads passes both halves of a group.
                number = 0 if len(scales) == 1 else part * 2 // fields if fields > 1 else None
                values = values * splat(_of_half(scales, number, j), QUAD)
                if minima:
                    values = values + splat(_of_half(minima, number, j), QUAD)
                lookup.write(column, values, QUAD)


def _of_half(numbers: Sequence[Expr], half: int | None, quad: Expr) -> Expr:
    """Returns the scale or minimum that applies to four consecutive values of a group of 32. numbers: one for
    each half of the group, or a single one. half: index in `numbers`; None: the code that is emitted chooses
    between two numbers by `quad`, the index from 0 to 7 of the four values in the group.
    """
    return numbers[half] if half is not None else T.Select(quad < QUADS // 2, numbers[0], numbers[1])


def copy_unpacked(lookup: TableRow, form: RowFormat) -> None:
    """Emits the copy of a row of an embedding table, as float32, into the output row, value by value, with
    the code by which products in float32 read the table's format.
    """
    with T.serial(0, i64(form.blocks)) as block:
        loaded = form.load(lookup.weights, lookup.token, block)
        for plane in range(form.planes):
            values = form.unpacked(loaded, plane)
            for lane in range(form.lanes):
                column = form.start(block) + lane * form.lane_step + plane * form.plane_step
                value = shuffle([values], [lane]) if form.lanes > 1 else values
                with T.If(column < lookup.hidden), T.Then():
                    T.buffer_store(lookup.out, value * f32(1 / form.factor(plane)), [lookup.row, column])
