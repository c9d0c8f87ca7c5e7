"""Emits the product x @ W.T in float32 with weights stored row by row, for any row format.

Vectors run along K, so neither x nor the weights are transposed: lanes are summed once at the end of a row. A
row is read in blocks of `planes` vectors. x is first packed into the order in which a block's vectors appear;
where K is not a multiple of a block, the last block starts early and overlaps the one before it, and x is
zero in the lanes that are covered already. So no kernel has a remainder loop along K.

Expressions are nested rather than bound to variables: a pass of TVM takes time that grows with the square of
their number, and LLVM finds common subexpressions itself.

There are three paths by the number of rows m of x:

    1       weights stream through registers once;
    2 .. 16 the same with some rows of x for each pass over a few weight rows, which stay in L1; each row's
            sums are added in the order of a single row, so that they are the same bit by bit;
    more    a block of weights is converted to float32 in an L2-sized buffer for register tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.epilogue import Output, Stores, once, rows_from
from mlcbuild.compiler.cpu.kernels.floats import over_rows
from mlcbuild.compiler.cpu.kernels.prologue import SERIAL_BYTES, SERIAL_ROWS, Fusion
from mlcbuild.compiler.cpu.kernels.vectors import (
    Register,
    argument,
    f32,
    fma,
    i64,
    lane_sums,
    odd_lines,
    prim_func,
    register,
    registers,
    span,
)

COLUMNS = 4
"""Weight rows in a register tile. 8 take 2.2 times as long for 32 rows of x (Zen 5, `ci/bench/constants`)."""
STREAMED_ROWS = 16
"""Maximum number of rows of x for which weights are streamed and not unpacked into a buffer. Unpacking for 8
rows takes 1.8 times as long as streaming on Zen 5, and for 32 rows the same (`ci/bench/constants`)."""
BLOCK_VALUES = 1024
"""Maximum number of weights of one row that are unpacked at a time. On a core of Zen 5, half this number
takes the same time within 3 %, and twice this number up to 8 % less with 32 rows (`ci/bench/constants`)."""


class RowFormat(Protocol):
    """The interface of objects that emit reads of one stored weight matrix [n, k], block by block along a
    row. A loaded block is the tuple that `load` returns."""

    @property
    def name(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def isa(self) -> ISA: ...
    @property
    def lanes(self) -> int: ...
    @property
    def planes(self) -> int:
        """Returns the number of vectors in a block of a weight row. Lane l of vector p holds the weight with
        index start + l * lane_step + p * plane_step along k, where start is the block's first index."""

    @property
    def lane_step(self) -> int: ...
    @property
    def plane_step(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def offset(self) -> float:
        """Returns the number, 0 if none, that must be subtracted from each stored weight code, as a float,
        before it is multiplied by its scale: the code that represents the weight 0."""

    def factor(self, plane: int) -> float:
        """Returns the power of two, such as 16.0, by which vector number `plane` of a block of weights is too
        large when loaded, which saves shifts of codes. The activations x are divided by it beforehand."""

    def arguments(self) -> tuple[Buffer, ...]:
        """Declares the weights' stored tensors as the kernel's next arguments, and returns their buffers."""

    def stacked(self, count: int) -> RowFormat:
        """Returns a RowFormat, which emits reads of rows, for `count` matrices [n, k] of this format that are
        stored one after the other as one matrix [count * n, k]."""

    def start(self, block: Expr) -> Expr:
        """Returns the index along k, the summed dimension, of the first weight in a weight row's `block`."""

    def load(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> tuple[Expr, ...]: ...
    def streamed(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        """Returns vector number `plane` of the block that `load` read: `lanes` float32 codes of weights, to
        which offset and scale are not yet applied, too large by the power of two that `factor` returns."""

    def scale(self, loaded: tuple[Expr, ...]) -> Expr | None: ...
    def unpacked(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        """Returns vector number `plane` of the block of weights that `load` read: `lanes` float32 weights
        with offset and scale applied, but too large by the power of two that `factor` returns."""

    def fetch(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> None:
        """Emits prefetches of the weights that a loop will read after block `block` of weight row `row`."""


@dataclass(frozen=True)
class PackedRow:
    """The order of the float32 values in a packed row of x, the left factor of a product: `blocks` blocks of
    `planes` vectors of `lanes` values. If weights have an offset, each block has one more vector: minus the
    offset times the sum, lane by lane, of the block's vectors of x."""

    lanes: int
    planes: int
    blocks: int
    offset: bool

    @property
    def step(self) -> int:
        """Returns the number of float32 values in one block of a packed row of x: planes * lanes columns of
        x, and `lanes` more values if weights have an offset."""
        return (self.planes + self.offset) * self.lanes

    @property
    def stride(self) -> int:
        """Returns the number of floats from one packed row of x to the next, which fill an odd number of
        cache lines: rows then share no cache sets."""
        return odd_lines(self.blocks * self.step)


def packed(form: RowFormat) -> PackedRow:
    return PackedRow(form.lanes, form.planes, form.blocks, form.offset != 0)


def block_rows(n: int) -> int:
    """Returns the number of weight rows that are unpacked at a time, which fit the L2 cache (256 KiB): 64, or
    32 if n < 1024 (`n`: rows of the matrix), since some threads would otherwise have no block."""
    return 64 if n >= 1024 else 32


def streamed_batch(form: RowFormat) -> int:
    """Returns the number of rows of x that share one pass over weights that stream from memory: that of the
    instruction set, or 2 if an offset is subtracted from weights, since a sum then takes two registers."""
    return 2 if form.offset else form.isa.batch


def product(form: RowFormat, fusion: Fusion) -> PrimFunc:
    """Returns the kernel (tensors from which x [m, k] is computed, stored weights W [n, k], bias float32 [n]
    if fused, out float32 [m, n], to which the product is added if a residual is fused) of x @ W.T. Sums of up
    to 16 rows have the bits of a single row's; those of more rows have another order."""

    def multiply(call: FloatCall, lines: Buffer) -> None:
        with T.If(call.m == 1):
            with T.Then():
                _one_row(call, lines)
            with T.Else():
                _several_rows(call, lines)

    return product_kernel(form, fusion, fusion.named(f"{form.name}_{form.n}x{form.k}"), multiply)


def product_kernel(
    form: RowFormat, fusion: Fusion, name: str, multiply: Callable[[FloatCall, Buffer], None]
) -> PrimFunc:
    """Returns a kernel (tensors of x, stored weights, bias if fused, out) that computes and packs the rows of
    x, then multiplies. multiply: function of (operands, packed rows of x) that emits the product itself."""

    def body() -> None:
        m = T.int64()
        arguments = fusion.source.arguments(m, form.k)
        weights = form.arguments()
        added = argument("bias", (form.n,), "float32") if fusion.bias else None
        out = argument("out", (m, form.n), "float32")
        call = FloatCall(form, weights, Output(out, form.n, added, COLUMNS, fusion.residual), m)
        with T.sblock(name):
            # Declared explicitly: inferring access regions takes TVM about 1 s.
            T.reads()
            T.writes()
            lines = T.alloc_buffer((m, packed(form).stride), "float32")
            over_rows(
                m, SERIAL_ROWS, lambda row: pack_row(form, fusion.source.row(arguments, row), lines, row)
            )
            multiply(call, lines)

    return prim_func(name, body)


@dataclass(frozen=True)
class FloatCall:
    """The operands that all code paths of one float32 product share while its kernel is emitted."""

    form: RowFormat
    weights: tuple[Buffer, ...]
    output: Stores
    m: Expr
    first: Expr | None = None
    """Index of the multiplied matrix's first row, if stored tensors hold several matrices; None if one."""

    def row(self, row: Expr) -> Expr:
        """Returns a weight row's index in stored tensors; the matrix's last row replaces rows beyond it."""
        bounded = T.min(row, i64(self.form.n - 1)) if self.form.n % COLUMNS else row
        return bounded if self.first is None else self.first + bounded


def _one_row(call: FloatCall, lines: Buffer) -> None:
    form = call.form
    small = form.n * form.row_bytes < SERIAL_BYTES
    with (T.serial if small else T.parallel)(0, i64(-(-form.n // form.isa.stream_rows))) as tile:
        stream_tile(call, lines, tile, [i64(0)])


def _several_rows(call: FloatCall, lines: Buffer) -> None:
    form, m, batch = call.form, call.m, streamed_batch(call.form)
    tiles, groups = i64(-(-form.n // form.isa.stream_rows)), (m + (batch - 1)) // batch
    with T.If(m <= STREAMED_ROWS):
        with T.Then(), T.parallel(0, tiles) as tile, T.serial(0, groups) as group:
            stream_tile(call, lines, tile, rows_from(group * batch, batch, m))
        with T.Else(), T.parallel(0, i64(-(-form.n // block_rows(form.n)))) as block:
            _block_product(call, lines, block)


def pack_row(form: RowFormat, source: tuple[Buffer, Expr], lines: Buffer, row: Expr) -> None:
    """Emits code that packs a row of x into row `row` of `lines`: block by block as weights are loaded,
    divided by `factor`, zeros in lanes without a weight. source: (buffer float32 [.., k], row index)."""
    x, line = source
    order = packed(form)
    full_blocks = form.k // (form.lanes * form.planes)

    def pack_lane(block: Expr, lane: Expr, checked: bool) -> None:
        total: Expr = f32(0)
        for plane in range(form.planes):
            k = form.start(block) + lane * form.lane_step + plane * form.plane_step
            value = x[line, k]
            if checked:
                fresh = T.And(k >= full_blocks * form.lanes * form.planes, k < form.k)
                value = T.if_then_else(fresh, value, f32(0))
            total = total + value
            place = block * order.step + plane * form.lanes + lane
            T.buffer_store(lines, value * f32(1 / form.factor(plane)), [row, place])
        if order.offset:
            place = block * order.step + form.planes * form.lanes + lane
            T.buffer_store(lines, total * f32(-form.offset), [row, place])

    if full_blocks:
        with T.serial(0, i64(full_blocks)) as block, T.serial(0, i64(form.lanes)) as lane:
            pack_lane(block, lane, False)
    if full_blocks < form.blocks:
        with T.serial(i64(full_blocks), i64(form.blocks)) as block, T.serial(0, i64(form.lanes)) as lane:
            pack_lane(block, lane, True)


def stream_tile(
    call: FloatCall, lines: Buffer, tile: Expr, rows: Sequence[Expr], places: Sequence[Expr] | None = None
) -> None:
    """Emits the products of a few rows of x with one tile of weight rows, which stream from memory through
    registers. lines: all rows of x, packed; rows: indices in it of the rows to multiply; places: their output
    rows, ascending, by default `rows`. A row whose output row repeats the one before it only fills the batch,
    and is not stored."""
    places = rows if places is None else places
    form = call.form
    wide = form.isa.stream_rows
    acc = registers(len(rows), wide, form.lanes)
    columns = [call.row(tile * wide + c) for c in range(wide)]
    with T.serial(0, i64(form.blocks)) as block:
        for column in columns:
            form.fetch(call.weights, column, block)
        loaded = [form.load(call.weights, column, block) for column in columns]
        _stream_block(form, _XBlock(lines, rows, block), loaded, acc)
    for i, line in enumerate(acc):
        sums = lane_sums([cell.value for cell in line], form.lanes)
        with once(places, i):
            call.output.store(places[i], tile * wide, sums, wide, True)


@dataclass(frozen=True)
class _XBlock:
    """A part of some rows of x, those columns that are multiplied with one block of a weight row. lines:
    buffer of packed rows; rows: indices of the rows in it; block: index of the block."""

    lines: Buffer
    rows: Sequence[Expr]
    block: Expr

    def vector(self, order: PackedRow, i: int, plane: int) -> Expr:
        return self.lines[self.rows[i], span(self.block * order.step + plane * order.lanes, order.lanes)]


def _stream_block(
    form: RowFormat, x: _XBlock, loaded: Sequence[tuple[Expr, ...]], acc: Sequence[Sequence[Register]]
) -> None:
    """Emits acc[i][c] += the product, lane by lane, of one block of row i of x and the same block of weight
    row c, for each i and c; acc: float32 vectors. Scales and offsets are applied to the block's sum, which
    takes the fewest instructions per weight but twice the registers."""
    order, lanes = packed(form), form.lanes
    scales = [form.scale(block) for block in loaded]
    totals = acc
    if scales[0] is not None:
        totals = [[register(_start(x, order, i), lanes) for _ in loaded] for i in range(len(acc))]
    for plane in range(form.planes):
        values = [form.streamed(block, plane) for block in loaded]
        for i, line in enumerate(totals):
            for total, value in zip(line, values, strict=True):
                total.set(fma(value, x.vector(order, i, plane), total.value, lanes))
    if scales[0] is not None:
        for cells, line in zip(acc, totals, strict=True):
            for cell, total, scale in zip(cells, line, scales, strict=True):
                cell.set(fma(total.value, scale, cell.value, lanes))


def _start(x: _XBlock, order: PackedRow, i: int) -> Expr:
    """Returns the vector at which the sum for the i-th row of `x` in a block starts: minus the weights'
    offset times the row's block, summed lane by lane, as stored in packed x; zeros without an offset."""
    return x.vector(order, i, order.planes) if order.offset else f32(0, order.lanes)


@dataclass(frozen=True)
class _Chunk:
    """A range of blocks of each weight row, unpacked to float32 together: `count` blocks from `first` on."""

    first: Expr
    count: Expr


def _blocks_at_once(form: RowFormat) -> int:
    """Returns the number of blocks (planes * lanes weights each) of a weight row that are unpacked at a time:
    at most 1,024 weights, and nearly the same number each time."""
    chunks = -(-form.blocks // max(1, BLOCK_VALUES // (form.planes * form.lanes)))
    return -(-form.blocks // chunks)


def _scratch_stride(form: RowFormat) -> int:
    return odd_lines(_blocks_at_once(form) * form.planes * form.lanes)


def _block_product(call: FloatCall, lines: Buffer, index: Expr) -> None:
    """Emits the product of all rows of x with the block number `index` of weight rows, unpacked first."""
    form, m, high = call.form, call.m, block_rows(call.form.n)
    tiles = (T.min(i64(high), form.n - index * high) + (COLUMNS - 1)) // COLUMNS
    scratch = T.alloc_buffer((high, _scratch_stride(form)), "float32")
    size = _blocks_at_once(form)
    with T.serial(0, i64(-(-form.blocks // size))) as number:
        chunk = _Chunk(number * size, T.min(i64(size), form.blocks - number * size))
        with T.serial(0, tiles * COLUMNS) as r:
            _unpack_row(call, scratch, index, r, chunk)
        tall = form.isa.tile_rows
        with T.serial(0, (m + (tall - 1)) // tall) as group, T.serial(0, tiles) as tile:
            acc = _tile_product(call, lines, scratch, (group * tall, tile * COLUMNS), chunk)
            sums = [lane_sums([cell.value for cell in line], form.lanes) for line in acc]
            column = index * high + tile * COLUMNS
            with T.If(number == 0):
                with T.Then():
                    _store_rows(call, group * tall, column, sums, True)
                with T.Else():
                    _store_rows(call, group * tall, column, sums, False)


def _unpack_row(call: FloatCall, scratch: Buffer, index: Expr, r: Expr, chunk: _Chunk) -> None:
    """Emits code that unpacks the blocks `chunk` of a weight row to float32, in the order of packed x, into
    row `r` of `scratch`. index: number of the group of weight rows in `scratch`; r: index in the group."""
    form = call.form
    row = call.row(index * block_rows(form.n) + r)
    with T.serial(0, chunk.count) as b:
        loaded = form.load(call.weights, row, chunk.first + b)
        for plane in range(form.planes):
            place = span((b * form.planes + plane) * form.lanes, form.lanes)
            T.buffer_store(scratch, form.unpacked(loaded, plane), [r, place])


def _tile_product(
    call: FloatCall, lines: Buffer, scratch: Buffer, corner: tuple[Expr, Expr], chunk: _Chunk
) -> list[list[Register]]:
    """Emits the products of a few rows of x with 4 unpacked weight rows over a part of k, and returns the
    sums as registers [row of x][weight row]. corner: (first row of x, first row of `scratch`)."""
    form, lanes = call.form, call.form.lanes
    acc = registers(form.isa.tile_rows, COLUMNS, lanes)
    rows = rows_from(corner[0], form.isa.tile_rows, call.m)
    with T.serial(0, chunk.count) as b:
        x = _XBlock(lines, rows, chunk.first + b)
        for plane in range(form.planes):
            place = span((b * form.planes + plane) * lanes, lanes)
            columns = [scratch[corner[1] + c, place] for c in range(COLUMNS)]
            for i, line in enumerate(acc):
                vector = x.vector(packed(form), i, plane)
                for cell, column in zip(line, columns, strict=True):
                    cell.set(fma(column, vector, cell.value, lanes))
    return acc


def _store_rows(call: FloatCall, row: Expr, column: Expr, sums: Sequence[Expr], first: bool) -> None:
    for i, total in enumerate(sums):
        with T.If(row + i < call.m), T.Then():
            call.output.store(row + i, column, total, COLUMNS, first)
