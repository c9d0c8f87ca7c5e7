"""Emits the product x @ W.T with 3- to 8-bit weights in the x16 layout and activations quantized to 8 bits.

Weights are stored in tiles of 16 rows, with a lane for each row, so sums need no reduction over lanes. There
are three paths by the number of rows m of x. One row streams the weights. More rows go over a tile of weights
in batches, the first of which loads the tile from memory while it computes. If there are few registers, many
rows run register tiles over a block that is first unpacked into an L1-sized buffer. A fourth path is for
prompts, on processors with tile registers (AMX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.kernels import amx, amx_weights, int8_block
from mlcbuild.compiler.cpu.kernels.activation import activate
from mlcbuild.compiler.cpu.kernels.bf16_math import Rough
from mlcbuild.compiler.cpu.kernels.cores import FIXED, before_others, counter, one_launch, shared
from mlcbuild.compiler.cpu.kernels.epilogue import Output, once, rows_from
from mlcbuild.compiler.cpu.kernels.int8_call import Int8Call, sums
from mlcbuild.compiler.cpu.kernels.int8_group import ActivationRows, add_group, paired
from mlcbuild.compiler.cpu.kernels.prologue import SERIAL_BYTES, Fusion
from mlcbuild.compiler.cpu.kernels.quantize_activations import quantize_row
from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.compiler.cpu.kernels.vectors import (
    argument,
    i64,
    prefetch,
    prim_func,
    span,
)
from mlcbuild.quant.groups import TILE_ROWS

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
STREAMED_ROWS = 16
"""Maximum number of rows of x for which weights are not unpacked into a buffer first, on instruction sets
with few registers. With AVX2, unpacking takes 10 % longer for 16 rows on a core of Sapphire Rapids, but less
for 20 (`ci/bench/constants --isa avx2`)."""
FEW, FEW_FIXED = 32, 92
"""FEW: number of rows of x up to which FEW_FIXED percent of the tiles are assigned to cores statically,
instead of 75 percent: memory bandwidth is the limit, so the core that uses weights must also prefetch them.
With no static tiles, decoding was 10 to 20 % slower (`ci/bench/cpu`, two cores of Zen 4)."""


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
    matrix, m, fewer = call.matrix, call.m, call.isa.dot_batches[:-1]

    def quantize(row: Expr) -> None:
        quantize_row(matrix.records, call.ready(row), call.records, row)

    # At most half of the largest batch is prepared on one core, which takes less time than waking the others.
    with T.If(m <= fewer[-1]):
        with T.Then():
            with T.serial(m) as row:
                quantize(row)
            with T.If(m == 1):
                with T.Then():
                    _one_row(call)
                with T.Else():
                    tiles = counter()
                    with one_launch():
                        _one_batch(call, fewer, tiles)
        with T.Else():
            rows, tiles = counter(), counter()
            with one_launch():
                with before_others():
                    shared(m, rows, quantize)
                _many_rows(call, tiles)


def _many_rows(call: Int8Call, tiles: Buffer) -> None:
    matrix, tile = call.matrix, call.isa.dot_tile
    if tile is None:
        _in_batches(call, tiles)
        return
    with T.If(call.m <= STREAMED_ROWS):
        with T.Then():
            _in_batches(call, tiles)
        with T.Else():
            blocks = -(-matrix.tiles // matrix.block_tiles)
            shared(i64(blocks), tiles, lambda block: int8_block.product(call, block, tile))


def _one_row(call: Int8Call) -> None:
    matrix = call.matrix
    small = matrix.tiles * matrix.records.groups * matrix.tile_bytes < SERIAL_BYTES
    with (T.serial if small else T.parallel)(0, i64(matrix.tiles)) as tile:
        stream_tile(call, tile, [i64(0)])


def _one_batch(call: Int8Call, sizes: Sequence[int], tiles: Buffer) -> None:
    """Emits products of at most sizes[-1] rows of x, as a batch of the smallest of the ascending `sizes` that
    is not below their number."""

    def emit() -> None:
        rows = rows_from(i64(0), sizes[0], call.m)
        _each_tile(call, tiles, lambda tile: stream_tile(call, tile, rows))

    if len(sizes) == 1:
        emit()
        return
    with T.If(call.m <= sizes[0]):
        with T.Then():
            emit()
        with T.Else():
            _one_batch(call, sizes[1:], tiles)


def _in_batches(call: Int8Call, tiles: Buffer) -> None:
    m, (*_, half, most) = call.m, call.isa.dot_batches

    def product(tile: Expr) -> None:
        # A rest of at most half a batch is half a batch.
        count = T.bind((m + (half - 1)) // most)
        with T.serial(0, count) as part:
            stream_tile(call, tile, rows_from(part * most, most, m))
        rest = T.bind(count * most)
        with T.If(rest < m), T.Then():
            stream_tile(call, tile, rows_from(rest, half, m))

    _each_tile(call, tiles, product)


def _each_tile(call: Int8Call, tiles: Buffer, product: Callable[[Expr], None]) -> None:
    fixed = T.Select(call.m > FEW, i64(FIXED), i64(FEW_FIXED))
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
    acc = sums(call, rows, matrix.vectors)
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
