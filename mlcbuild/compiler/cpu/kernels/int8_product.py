"""Emits the product x @ W.T with 3- to 8-bit weights in the x16 layout and activations quantized to 8 bits.

Weights are stored in tiles of 16 rows, with a lane for each row, so sums need no reduction over lanes. There
are three paths by the number of rows m of x. One row streams the weights. More rows go over a tile of weights
in batches, the first of which loads the tile from memory while it computes. If there are few registers, many
rows run register tiles over a block that is first unpacked into an L1-sized buffer. A fourth path is for
prompts, on processors with tile registers (AMX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import amx, amx_weights
from mlcbuild.compiler.cpu.kernels.activation import activate
from mlcbuild.compiler.cpu.kernels.bf16_math import Rough
from mlcbuild.compiler.cpu.kernels.cores import FIXED, before_others, counter, one_launch, shared
from mlcbuild.compiler.cpu.kernels.epilogue import Output, Stores, once, rows_from
from mlcbuild.compiler.cpu.kernels.int8_group import ActivationRows, Column, add_group, paired
from mlcbuild.compiler.cpu.kernels.prologue import SERIAL_BYTES, Fusion
from mlcbuild.compiler.cpu.kernels.quantize_activations import quantize_row
from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.compiler.cpu.kernels.vectors import (
    Register,
    argument,
    i64,
    prefetch,
    prim_func,
    register,
    span,
    splat,
    typed,
)
from mlcbuild.quant.groups import QUAD, QUADS, TILE_ROWS

FETCH_BYTES = 3072
"""Prefetch distance for weights in bytes. It is less than a page of 4 KiB, because the hardware prefetcher of
the L2 cache, which follows the reader within a page, would otherwise find nothing left to fetch. When it was
set, this distance made a token of a model of TinyLlama's shape 8 % faster (`ci/bench/cpu`, one thread). On a
core of Zen 5, distances from 1 KiB to 6 KiB differ by less than 5 % (`ci/bench/constants`)."""
FAR_BYTES = 8192
"""Distance in bytes, from each group of 32 columns of a weight tile, at which one cache line is also
prefetched while several rows of x are multiplied. The hardware prefetcher then starts on a page before
products need it, and memory is never idle. When it was set, this prefetch made a step of 8 sequences of
TinyLlama's shape 8 % faster (`ci/bench/cpu`, one thread). On a core of Zen 5, distances of 4 KiB and 16 KiB
take the same time within 4 % (`ci/bench/constants`)."""
STREAMED_BATCHES = 6
"""Maximum number of batches of rows of x for which weights are not unpacked into a buffer first, on
instruction sets with few registers. With AVX2, unpacking takes 8 % longer for 16 rows (4 batches) on a core
of Sapphire Rapids, up to 15 % less for 24 on one of Zen 5 (`ci/bench/constants --isa avx2`)."""
FEW, FEW_FIXED = 32, 92
"""FEW: number of rows of x up to which FEW_FIXED percent of the tiles are assigned to cores statically,
instead of 75 percent: memory bandwidth is the limit, so the core that uses weights must also prefetch them.
With no static tiles, decoding was 10 to 20 % slower (`ci/bench/cpu`, two cores of Zen 4)."""


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


def product(matrix: TiledMatrix, fusion: Fusion) -> PrimFunc:
    """Returns the kernel that computes x @ W.T for x [m, k] and one stored matrix W [n, k]. Its arguments are
    the tensors from which the fused prologue computes rows of x, the tensors that store W, bias float32 [n]
    if one is fused, and out float32 [m, n], to which results are added if the fusion has `residual`.

    With AMX there is also an int64 argument `prompt` before `out`. If it is not 0, all rows are computed with
    tile registers in bfloat16, without quantizing x, however few they are; if the fusion has a gate, `out`
    then holds the gated values, packed for the next product. Otherwise a gate changes nothing, and results
    have the same bits with and without AMX.
    """
    isa, n, k = matrix.isa, matrix.n, matrix.k
    name = fusion.named(f"{matrix.name}_{n}x{k}")

    def body() -> None:
        m = T.int64()
        arguments = fusion.source.arguments(m, k)
        weights = matrix.arguments(1)
        added = argument("bias", (n,), "float32") if fusion.bias else None
        prompt = T.arg("prompt", T.int64()) if isa.amx else None
        out, step = argument("out", (m, n), "float32"), TILE_ROWS * matrix.block_tiles
        output = Output(out, n, added, step, fusion.residual)
        with T.sblock(name):
            # Declared explicitly: inferring access regions takes TVM about 1 s.
            T.reads()
            T.writes()
            records = T.alloc_buffer((m, matrix.records.stride), "int32")
            ready = partial(fusion.source.row, arguments)
            call = Int8Call(matrix, weights, output, ready, records, m)
            if prompt is None:
                _any_rows(call)
                return
            with T.If(prompt == 0):
                with T.Then():
                    _any_rows(call)
                with T.Else():
                    _prompt(call, fusion, arguments)

    return prim_func(name, body)


def _prompt(call: Int8Call, fusion: Fusion, arguments: Sequence[Buffer]) -> None:
    """Emits the product x @ W.T, in bfloat16 on AMX tile registers, of all rows of x into the buffer of
    `call.output`; with a gate, the gated values, packed for the next product. arguments: the kernel's buffers
    from which x is read or, with a fused prologue, computed.
    """
    matrix, m, source, gate = call.matrix, call.m, fusion.source, fusion.gate
    shape = amx.Shape(matrix.n, matrix.k, gate is not None)
    x = amx.Packed.inside(arguments[0], matrix.k, m) if source.packed else amx.pack(shape, call.ready, m)
    assert isinstance(call.output, Output)
    output: Output | amx.GatedOutput = call.output
    if gate is not None:
        floats, act = Rough(call.isa, amx.LANES), gate.activation
        out = amx.Packed.inside(call.output.buffer, matrix.n // 2, m)
        output = amx.GatedOutput(lambda gate, up: activate(floats, act, gate) * up, out)
    amx.product(shape, x, m, partial(_unpack_tile, call), output)


def _any_rows(call: Int8Call) -> None:
    matrix, m, most = call.matrix, call.m, call.isa.dot_batch

    def quantize(row: Expr) -> None:
        quantize_row(matrix.records, call.ready(row), call.records, row)

    # At most half a batch of rows skips the products of the other half, and is prepared on one core, which
    # takes less time than waking the others.
    with T.If(m <= most // 2):
        with T.Then():
            with T.serial(m) as row:
                quantize(row)
            with T.If(m == 1):
                with T.Then():
                    _one_row(call)
                with T.Else():
                    tiles = counter()
                    with one_launch():
                        _in_batches(call, most // 2, tiles)
        with T.Else():
            rows, tiles = counter(), counter()
            with one_launch():
                with before_others():
                    shared(m, rows, quantize)
                _many_rows(call, tiles)


def _many_rows(call: Int8Call, tiles: Buffer) -> None:
    matrix, most, tile = call.matrix, call.isa.dot_batch, call.isa.dot_tile
    if tile is None:
        _in_batches(call, most, tiles)
        return
    with T.If(call.m <= STREAMED_BATCHES * most):
        with T.Then():
            _in_batches(call, most, tiles)
        with T.Else():
            blocks = -(-matrix.tiles // matrix.block_tiles)
            shared(i64(blocks), tiles, lambda block: _block_product(call, block, tile))


def _one_row(call: Int8Call) -> None:
    matrix = call.matrix
    small = matrix.tiles * matrix.records.groups * matrix.tile_bytes < SERIAL_BYTES
    with (T.serial if small else T.parallel)(0, i64(matrix.tiles)) as tile:
        stream_tile(call, tile, [i64(0)])


def _in_batches(call: Int8Call, batch: int, tiles: Buffer) -> None:
    m = call.m

    def product(tile: Expr) -> None:
        with T.serial(0, (m + (batch - 1)) // batch) as part:
            stream_tile(call, tile, rows_from(part * batch, batch, m))

    fixed = T.Select(m > FEW, i64(FIXED), i64(FEW_FIXED))
    shared(i64(call.matrix.tiles), tiles, product, fixed)


def _unpack_tile(call: Int8Call, buffer: Buffer, place: tuple[Expr, Expr], tile: Expr, group: Expr) -> None:
    """Emits code that unpacks one group of 32 columns of a tile of 16 weight rows to bfloat16, for AMX:
    weights with their scales applied, times 2**-104, which the factor 2**104 of the packed x cancels. place:
    index in `buffer` of the result, int32 [16, 16] with two weights in each."""
    columns = span(0, TILE_ROWS)

    def store(row: Expr | int, line: Expr) -> None:
        T.buffer_store(buffer, line, [*place, row, columns])

    scales = T.bind(call.weights[1][tile, group, columns])
    amx_weights.unpack(call.matrix.bits, partial(call.packed, tile, group, vector=0), scales, store)


def _fetch(call: Int8Call, tile: Expr, group: Expr, alone: bool) -> None:
    """Emits prefetches of the weights that are read 3 KiB after the given group of a tile and, for several
    rows of x, of a line 8 KiB after it. alone: True if x has one row; weights then go to the second-level
    cache only, because prefetches into the first level would slow down its product."""
    for line in range(0, call.matrix.tile_bytes, 64):
        place = (call.stored(tile), group, line + FETCH_BYTES)
        prefetch(call.weights[0], place, locality=2 if alone else 3)
    if not alone:
        prefetch(call.weights[0], (call.stored(tile), group, FAR_BYTES), locality=2)


def stream_tile(
    call: Int8Call, tile: Expr, rows: Sequence[Expr], places: Sequence[Expr] | None = None
) -> None:
    """Emits the products of a few rows of x with one tile of 16 weight rows, which stream from memory through
    registers.

    rows: indices of the rows of x, which must be in call.records already; places: the output rows, ascending,
    by default `rows`; a row that repeats the one before it is not stored."""
    places = rows if places is None else places
    matrix, isa = call.matrix, call.isa
    acc = _sums(call, rows, matrix.vectors)
    x, parts = ActivationRows(matrix, call.records, rows), [range(matrix.vectors)]
    if isa.lanes == 8 and len(rows) > 1:  # 16 registers hold the sums of one vector of weight rows.
        parts = [range(vector, vector + 1) for vector in range(matrix.vectors)]
    for part in parts:
        with T.serial(0, i64(matrix.records.groups)) as group:
            if part.start == 0:
                _fetch(call, tile, group, len(rows) == 1)
            for vector in part:
                column = call.column(tile, group, vector, paired(matrix, len(rows)))
                add_group(x, group, [column], [[line[vector]] for line in acc])
    for i, cells in enumerate(acc):
        with once(places, i):
            for vector, cell in enumerate(cells):
                column = tile * TILE_ROWS + vector * isa.lanes
                call.output.store(places[i], column, cell.value, isa.lanes, True)


def _sums(call: Int8Call, rows: Sequence[Expr], vectors: int) -> list[list[Register]]:
    """Emits the float32 accumulators for products of rows of x with weight rows, and returns them as
    [row][vector]. They start at 0; with power-of-two scales of activations, at NaN for a row with a NaN or a
    value above 127 * 2**104. rows: indices of the rows of x; vectors: number of vectors, each with one weight
    row per lane."""
    lanes, records = call.isa.lanes, call.matrix.records
    starts = [T.bind(splat(records.start(call.records, row), lanes)) for row in rows]
    return [[register(start, lanes) for _ in range(vectors)] for start in starts]


@dataclass(frozen=True)
class _Scratch:
    """Weights of a block of tiles of 16 rows, unpacked for `count` groups of 32 columns from group `first`
    on. operands: int32 [groups, operands, rows of all tiles], where the operands are one or two int32 for
    each four columns of a group; numbers: float32 [groups, scales and then minima, rows of all tiles]."""

    operands: Buffer
    numbers: Buffer
    first: Expr
    count: Expr


def _block_product(call: Int8Call, block: Expr, shape: tuple[int, int]) -> None:
    """Emits code that unpacks one block of weight tiles (16 rows each) into scratch buffers, multiplies it by
    all rows of x, and stores the sums in `call.output`, where those of later parts of the columns are added
    to the first ones. block: index of the block; shape: size of a register tile, (rows of x, vectors, each
    with one weight row per lane)."""
    matrix, isa, m = call.matrix, call.isa, call.m
    wide = matrix.block_tiles * TILE_ROWS
    operands = T.alloc_buffer((matrix.block_groups, QUADS * matrix.dot.parts, wide), "int32")
    numbers = matrix.records.halves * (1 + matrix.records.sums)
    scales = T.alloc_buffer((matrix.block_groups, numbers, wide), "float32")
    size, groups = matrix.block_groups, matrix.records.groups
    with T.serial(0, i64(-(-groups // size))) as number:
        count = T.min(i64(size), groups - number * size)
        scratch = _Scratch(operands, scales, number * size, count)
        tall = shape[0]
        with T.serial(0, count) as group:
            _unpack(call, scratch, block, group, paired(call.matrix, tall))
        with T.serial(0, (m + (tall - 1)) // tall) as part:
            step = min(shape[1], matrix.block_tiles * matrix.vectors)
            for vector in range(0, matrix.block_tiles * matrix.vectors, step):
                rows = rows_from(part * tall, tall, m)
                acc = _tile_product(call, scratch, rows, range(vector, vector + step))
                column = block * wide + vector * isa.lanes
                with T.If(number == 0):
                    with T.Then():
                        _store_tile(call, part * tall, column, acc, True)
                    with T.Else():
                        _store_tile(call, part * tall, column, acc, False)


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


def _tile_product(
    call: Int8Call, scratch: _Scratch, rows: Sequence[Expr], vectors: range
) -> list[list[Register]]:
    """Emits the products of some rows of x with rows of an unpacked block of weights, over the columns that
    are unpacked in `scratch`, and returns the float32 accumulators, sums over these columns only, as
    [row][vector]. A vector covers as many weight rows as a register has int32 lanes. vectors: indices of the
    vectors in the block."""
    isa = call.isa
    acc = _sums(call, rows, len(vectors))
    count = call.matrix.dot.parts
    with T.serial(0, scratch.count) as group:
        columns = []
        for vector in vectors:
            lane = span(vector * isa.lanes, isa.lanes)
            loaded = [
                [scratch.operands[group, q * count + p, lane] for p in range(count)] for q in range(QUADS)
            ]
            halves = call.matrix.records.halves
            numbers = [scratch.numbers[group, i, lane] for i in range(int(scratch.numbers.shape[1]))]
            columns.append(Column(loaded, numbers[:halves], numbers[halves:]))
        add_group(ActivationRows(call.matrix, call.records, rows), scratch.first + group, columns, acc)
    return acc


def _store_tile(
    call: Int8Call, first: Expr, column: Expr, acc: Sequence[Sequence[Register]], fresh: bool
) -> None:
    lanes = call.isa.lanes
    for i, line in enumerate(acc):
        with T.If(first + i < call.m), T.Then():
            for c, cell in enumerate(line):
                call.output.store(first + i, column + c * lanes, cell.value, lanes, fresh)
