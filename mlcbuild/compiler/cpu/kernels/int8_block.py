"""Emits products of many rows of x with a block of weights that is first unpacked into an L1-sized buffer, on
processors with few registers.

While a block is multiplied, the codes and scales of the next one are prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.epilogue import once, rows_from
from mlcbuild.compiler.cpu.kernels.int8_call import Int8Call, sums
from mlcbuild.compiler.cpu.kernels.int8_group import ActivationRows, Column, add_group, paired
from mlcbuild.compiler.cpu.kernels.vectors import Register, i64, prefetch, span
from mlcbuild.quant.groups import QUADS, TILE_ROWS


@dataclass(frozen=True)
class _Scratch:
    """Weights of a block of tiles of 16 rows, unpacked for `count` groups of 32 columns from group `first`
    on. operands: int32 [groups, operands, rows of all tiles], where the operands are one or two int32 for
    each four columns of a group; numbers: float32 [groups, scales and then minima, rows of all tiles]."""

    operands: Buffer
    numbers: Buffer
    first: Expr
    count: Expr


def product(call: Int8Call, block: Expr, shape: tuple[int, int]) -> None:
    """Emits code that unpacks one block of weight tiles (16 rows each) into scratch buffers, multiplies it by
    all rows of x, and stores the results in `call.output`. Where the columns do not fit the buffers, they are
    multiplied in parts, whose sums continue those of the part before: results have the same bits as those of
    rows that are multiplied alone. block: index of the block; shape: size of a register tile, (rows of x,
    vectors, each with one weight row per lane)."""
    matrix, m, (tall, wide) = call.matrix, call.m, shape
    width = matrix.block_tiles * TILE_ROWS
    operands = T.alloc_buffer((matrix.block_groups, QUADS * matrix.dot.parts, width), "int32")
    numbers = matrix.records.halves * (1 + matrix.records.sums)
    scales = T.alloc_buffer((matrix.block_groups, numbers, width), "float32")
    size, groups = matrix.block_groups, matrix.records.groups
    parts = -(-groups // size)
    partial = T.alloc_buffer((m, width), "float32") if parts > 1 else None
    with T.serial(0, i64(parts)) as number:
        count = T.min(i64(size), groups - number * size)
        scratch = _Scratch(operands, scales, number * size, count)
        with T.serial(0, count) as group:
            _unpack(call, scratch, block, group, paired(call.matrix, tall))
        tiles = T.bind((m + (tall - 1)) // tall)
        with T.serial(0, tiles) as tile:
            _fetch_next(call, scratch, block, (tile, tiles))
            step = min(wide, matrix.block_tiles * matrix.vectors)
            for vector in range(0, matrix.block_tiles * matrix.vectors, step):
                rows = rows_from(tile * tall, tall, m)
                cells = _Cells(rows, vector * matrix.isa.lanes, sums(call, rows, step))
                if partial is not None:
                    with T.If(number > 0), T.Then():
                        _load(call, cells, partial)
                _add(call, scratch, cells, range(vector, vector + step))
                if partial is None:
                    _store(call, cells, block * width)
                    continue
                with T.If(number == parts - 1):
                    with T.Then():
                        _store(call, cells, block * width)
                    with T.Else():
                        _keep(call, cells, partial)


def _unpack(call: Int8Call, scratch: _Scratch, block: Expr, group: Expr, paired: bool) -> None:
    matrix, isa = call.matrix, call.isa
    for t in range(matrix.block_tiles):
        tile = T.min(block * matrix.block_tiles + t, i64(matrix.tiles - 1))
        for vector in range(matrix.vectors):
            lane = span(t * TILE_ROWS + vector * isa.lanes, isa.lanes)
            scales, minima = call.numbers(tile, scratch.first + group, vector)
            for number, value in enumerate([*scales, *minima]):
                T.buffer_store(scratch.numbers, value, [group, number, lane])
            for quad, values in enumerate(call.operands(tile, scratch.first + group, vector, paired)):
                for part, value in enumerate(values):
                    place = quad * matrix.dot.parts + part
                    T.buffer_store(scratch.operands, value, [group, place, lane])


def _fetch_next(call: Int8Call, scratch: _Scratch, block: Expr, turn: tuple[Expr, Expr]) -> None:
    """Emits prefetches of a share of the codes and scales that are unpacked next: those of the next part of
    the columns or of the next block, which follow in memory. turn: (number of the tile of rows of x that is
    about to be multiplied, number of these tiles), which determine the share."""
    matrix, (tile, tiles) = call.matrix, turn
    lines = matrix.tile_bytes // 64
    share = T.bind((scratch.count * (lines * matrix.block_tiles) + tiles - 1) // tiles)
    with T.serial(0, share) as i:
        line = T.bind(tile * share + i)
        group = T.bind(scratch.first + scratch.count + line // lines)
        first = call.stored(block * matrix.block_tiles)
        prefetch(call.weights[0], (first, group, (line % lines) * 64), locality=2)
        prefetch(call.weights[1], (first, group, 0), locality=2)


@dataclass(frozen=True)
class _Cells:
    """The sums of one register tile: of some rows of x with some rows of a block of weights."""

    rows: Sequence[Expr]
    """Indices of the rows of x. Beyond the last row, its index repeats."""
    column: int
    """Index, in the block, of the first weight row."""
    acc: Sequence[Sequence[Register]]
    """float32 sums, [row of x][vector], with a lane for each weight row."""


def _add(call: Int8Call, scratch: _Scratch, cells: _Cells, vectors: range) -> None:
    """Emits the addition of products of some rows of x with rows of an unpacked block of weights to `cells`,
    over the columns that are unpacked in `scratch`. vectors: indices of the vectors in the block, each of
    which covers as many weight rows as a register has int32 lanes."""
    isa, x = call.isa, ActivationRows(call.matrix, call.records, cells.rows)
    count, halves = call.matrix.dot.parts, call.matrix.records.halves
    with T.serial(0, scratch.count) as group:
        columns = []
        for vector in vectors:
            lane = span(vector * isa.lanes, isa.lanes)
            loaded = [
                [scratch.operands[group, q * count + p, lane] for p in range(count)] for q in range(QUADS)
            ]
            numbers = [scratch.numbers[group, i, lane] for i in range(int(scratch.numbers.shape[1]))]
            columns.append(Column(loaded, numbers[:halves], numbers[halves:]))
        add_group(x, scratch.first + group, columns, cells.acc)


def _load(call: Int8Call, cells: _Cells, partial: Buffer) -> None:
    """Emits loads of the sums of earlier columns into `cells`. partial: float32 [rows of x, weight rows]."""
    for row, line in zip(cells.rows, cells.acc, strict=True):
        for c, cell in enumerate(line):
            cell.set(partial[row, span(cells.column + c * call.isa.lanes, call.isa.lanes)])


def _keep(call: Int8Call, cells: _Cells, partial: Buffer) -> None:
    """Emits stores of sums over some of the columns, which _load loads."""
    for row, line in zip(cells.rows, cells.acc, strict=True):
        for c, cell in enumerate(line):
            place = span(cells.column + c * call.isa.lanes, call.isa.lanes)
            T.buffer_store(partial, cell.value, [row, place])


def _store(call: Int8Call, cells: _Cells, first: Expr) -> None:
    """Emits stores of complete sums in `call.output`. first: index of the block's first weight row."""
    for i, line in enumerate(cells.acc):
        with once(cells.rows, i):
            for c, cell in enumerate(line):
                column = first + cells.column + c * call.isa.lanes
                call.output.store(cells.rows[i], column, cell.value, call.isa.lanes, True)
