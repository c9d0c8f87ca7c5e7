"""Emits products of rows with the matrices of the experts that each row has chosen: rows are grouped by
expert.

The pairs (row, chosen expert) are sorted by expert, so that an expert's weights are read once, for all of its
rows; experts without rows are not read. There are three kernels, and each is launched once:

gather    x [m, k] -> [m * chosen, n]: a result for each pair; cores share out experts and tiles.
pairs     [m * chosen, k] -> [m * chosen, n]: as gather, but x has one row for each pair.
scatter   [m * chosen, k] -> x [m, n] += the results of a row's pairs times their weights, by ascending
          expert; cores share out columns, so that none waits for another, and each sum has one order.

A row's sums never depend on the other rows of the batch. The matrices of all experts are stored as one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.kernels import float_product, int8_product
from mlcbuild.compiler.cpu.kernels.cores import FIXED, before_others, counter, one_launch, shared
from mlcbuild.compiler.cpu.kernels.epilogue import Output, Stores
from mlcbuild.compiler.cpu.kernels.int8_call import Int8Call
from mlcbuild.compiler.cpu.kernels.linear import Linear, row_format, tiles
from mlcbuild.compiler.cpu.kernels.prologue import RowSource
from mlcbuild.compiler.cpu.kernels.quantize_activations import quantize_row
from mlcbuild.compiler.cpu.kernels.vectors import argument, i64, prim_func, register, splat
from mlcbuild.quant.groups import TILE_ROWS

CHUNKS = 8
"""Number of parts per core into which the columns of the result are divided by the kernel that adds the
results of experts to rows, so that cores finish at the same time; one part per core if the batch uses no more
experts than one row chooses. On two cores of Zen 5, 2 to 16 parts take the same time within 6 %
(`ci/bench/constants --threads 2`).
"""


@dataclass(frozen=True)
class ExpertMatrices:
    """The matrices of all experts of a layer, and the number of experts that each row (token) uses."""

    linear: Linear
    """The product x @ W.T with the matrix W of one expert, as a `Linear`: instruction set, W's quantization
    scheme, and W's numbers of rows and columns."""
    count: int
    chosen: int


@dataclass(frozen=True)
class _Plan:
    """The pairs (row, chosen expert) of a batch, sorted by expert, as int32 buffers of the emitted kernel:
    the numbers of the experts in use, where the pairs of each start, and the pairs themselves.
    """

    experts: Buffer
    """Numbers of those experts that at least one row has chosen, ascending, int32 [experts]; only as many
    elements are set as there are such experts.
    """
    starts: Buffer
    """For each expert that at least one row has chosen, the index of its first pair in the list of pairs
    (row, chosen expert) sorted by expert; then the number of pairs. int32 [experts + 1].
    """
    order: Buffer
    """The pairs (row, chosen expert) sorted by expert, int32 [pairs]. A pair is stored as row * c + i, where
    c is the number of experts that each row chooses, and i the index of the expert among the row's choices.
    """
    used: Expr
    """Number of experts that at least one row has chosen, an int64 expression of the kernel."""


@dataclass(frozen=True)
class _Part:
    """The code generator for the product of one tile (some rows) of an expert's weights with some rows of
    x.
    """

    tile: Callable[[Expr, Expr, Sequence[Expr], Sequence[Expr]], None]
    """Function from (expert, index of a tile of its matrix, indices of packed rows of x, indices of their
    output rows) that emits the code which computes and stores one tile of results.
    """
    tiles: int
    width: int
    """Number of columns of the result in one tile of an expert's product."""
    batches: tuple[int, ...]
    """Numbers of rows of x by which a tile of an expert's weights can be multiplied at once, ascending."""


@cache
def kernel(
    stack: ExpertMatrices, source: RowSource, scatter: bool, fresh: bool = False, pairs: bool = False
) -> PrimFunc:
    """Returns the kernel (choices float32 [m, 2 * chosen], tensors from which rows of x are computed, stored
    weights, out) that multiplies rows of x with the matrices of their chosen experts. A row of `choices`
    holds the numbers of its experts and then their weights.

    source: the prologue (code in front of the product) that computes rows of x. scatter: True if the results
    of a row's experts, times their weights, are added to the row of `out`, float32 [m, n]; False if each pair
    (row, chosen expert) has a row of results in `out`, [m * chosen, n]. fresh: True if `out` is first set to
    zero, only with scatter. pairs: True if x has one row for each pair, as it always has with scatter; False
    if one for each row of `choices`. Raises CompileError if there is no kernel for the format of the weights.
    """
    linear = stack.linear
    kind, by_pair = "scatter" if scatter else "pairs" if pairs else "gather", pairs
    shape = f"{stack.chosen}of{stack.count}x{linear.n}x{linear.k}"
    name = f"{source.name}{linear.name.partition('.')[0]}_{shape}_{kind}{'_fresh' * fresh}"

    def body() -> None:
        m = T.int64()
        choices = argument("choices", (m, 2 * stack.chosen), "float32")
        pairs = m * stack.chosen
        rows = pairs if scatter or by_pair else m
        inputs = source.arguments(rows, linear.k)
        weights = _weights(stack)
        out = argument("out", (m if scatter else pairs, linear.n), "float32")
        with T.sblock(name):
            T.reads()
            T.writes()
            plan = _plan(stack, choices, pairs)
            output: Stores = (
                _Weighted(_output(stack, out, True), choices, stack.chosen)
                if scatter
                else (_output(stack, out, False))
            )
            make, part = _product(stack, weights, partial(source.row, inputs), output, rows)
            first, second = counter(), counter()
            with one_launch():
                with before_others():
                    shared(rows, first, make)
                if scatter:
                    _scatter(stack, plan, part, second, (out, m, fresh))
                else:
                    _gather(stack, plan, part, second, by_pair)

    return prim_func(name, body, simplified=False)


def _weights(stack: ExpertMatrices) -> tuple[Buffer, ...]:
    """Declares the kernel's arguments for the stored tensors of the weights, which hold the matrices of all
    experts along axis 0, and returns the buffers.
    """
    linear = stack.linear
    form = row_format(linear)
    if form is not None:
        return form.stacked(stack.count).arguments()
    return tiles(linear).arguments(stack.count)


def _output(stack: ExpertMatrices, out: Buffer, residual: bool) -> Output:
    step = TILE_ROWS if row_format(stack.linear) is None else float_product.COLUMNS
    return Output(out, stack.linear.n, None, step, residual)


@dataclass(frozen=True)
class _Weighted:
    """The output of a product that adds each result of a pair (row, chosen expert) to the row, times the
    expert's weight for the row.
    """

    output: Output
    choices: Buffer
    chosen: int

    def store(self, row: Expr, column: Expr, values: Expr, lanes: int, first: bool) -> None:
        """Emits the addition of a vector of results, times the weight of the pair (row, chosen expert), to
        the output's row `row` // chosen, that of the pair, from `column` on. row: the number of the pair, its
        row * chosen + choice."""
        target_row, choice = T.truncdiv(row, i64(self.chosen)), T.truncmod(row, i64(self.chosen))
        weight = T.bind(self.choices[target_row, self.chosen + choice])
        self.output.store(target_row, column, values * splat(weight, lanes), lanes, first)


def _plan(stack: ExpertMatrices, choices: Buffer, pairs: Expr) -> _Plan:
    """Emits a counting sort of the pairs (row, chosen expert) by expert, and returns its buffers as a _Plan:
    chosen experts, where the pairs of each start, and the sorted pairs. choices: float32 [m, 2 * chosen], for
    each row the numbers of its experts and then their weights; pairs: number of pairs, m * chosen.
    """
    count, chosen = stack.count, stack.chosen
    experts, starts, nexts = (T.alloc_buffer((size,), "int32") for size in (count, count + 1, count))
    order = T.alloc_buffer((pairs,), "int32")

    def expert(pair: Expr) -> Expr:
        number = choices[T.truncdiv(pair, i64(chosen)), T.truncmod(pair, i64(chosen))]
        return T.bind(T.Cast("int64", number))

    with T.serial(0, i64(count)) as e:
        T.buffer_store(nexts, T.int32(0), [e])
    with T.serial(0, pairs) as pair:
        chosen_expert = expert(pair)
        T.buffer_store(nexts, nexts[chosen_expert] + 1, [chosen_expert])
    used, place = register(i64(0), 1, "int64"), register(T.int32(0), 1, "int32")
    with T.serial(0, i64(count)) as e:
        rows = T.bind(nexts[e])
        with T.If(rows > 0), T.Then():
            T.buffer_store(experts, T.Cast("int32", e), [used.value])
            T.buffer_store(starts, place.value, [used.value])
            T.buffer_store(nexts, place.value, [e])
            used.set(used.value + 1)
            place.set(place.value + rows)
    T.buffer_store(starts, place.value, [used.value])
    with T.serial(0, pairs) as pair:
        chosen_expert = expert(pair)
        T.buffer_store(order, T.Cast("int32", pair), [nexts[chosen_expert]])
        T.buffer_store(nexts, nexts[chosen_expert] + 1, [chosen_expert])
    return _Plan(experts, starts, order, T.bind(used.value))


Make = Callable[[Expr], None]


def _product(
    stack: ExpertMatrices,
    weights: Sequence[Buffer],
    ready: Callable[[Expr], tuple[Buffer, Expr]],
    output: Stores,
    rows: Expr,
) -> tuple[Make, _Part]:
    """Returns (function of a row's index that emits code which packs this row of x, code generator for the
    product of packed rows with one tile of an expert's weights). ready: function of a row's index that emits
    the row as float32 and returns (its buffer, index of the row there); output: emits stores of results;
    rows: number of rows of x.
    """
    linear = stack.linear
    form = row_format(linear)
    if form is not None:
        lines = T.alloc_buffer((rows, float_product.packed(form).stride), "float32")
        call = float_product.FloatCall(form, tuple(weights), output, rows)

        def float_tile(expert: Expr, tile: Expr, x_rows: Sequence[Expr], places: Sequence[Expr]) -> None:
            float_product.stream_tile(replace(call, first=expert * linear.n), lines, tile, x_rows, places)

        batch, width = float_product.streamed_batch(form), linear.isa.stream_rows
        part = _Part(float_tile, -(-linear.n // width), width, (1, batch))
        return lambda row: float_product.pack_row(form, ready(row), lines, row), part
    matrix = tiles(linear)
    records = T.alloc_buffer((rows, matrix.records.stride), "int32")
    product_call = Int8Call(matrix, tuple(weights), output, ready, records, rows)

    def int8_tile(expert: Expr, tile: Expr, x_rows: Sequence[Expr], places: Sequence[Expr]) -> None:
        int8_product.stream_tile(replace(product_call, first=expert * matrix.tiles), tile, x_rows, places)

    part = _Part(int8_tile, matrix.tiles, TILE_ROWS, (1, *linear.isa.dot_batches))
    return lambda row: quantize_row(matrix.records, ready(row), records, row), part


def _gather(stack: ExpertMatrices, plan: _Plan, part: _Part, counter: Buffer, by_pair: bool) -> None:
    """Emits the products that have a row of results for each pair (row, chosen expert), divided among cores
    by expert and tile of weights. by_pair: True if x has one row for each pair, False if one for each token.
    """

    def unit(number: Expr) -> None:
        place, tile = (T.bind(cut(number, i64(part.tiles))) for cut in (T.truncdiv, T.truncmod))
        _rows(plan, part, place, tile, lambda pair: pair if by_pair else T.truncdiv(pair, i64(stack.chosen)))

    shared(plan.used * part.tiles, counter, unit, _fixed(plan, stack))


def _fixed(plan: _Plan, stack: ExpertMatrices) -> Expr:
    """Returns an int64 expression of the kernel: the percentage of a parallel loop's iterations that are
    assigned to cores statically. It is 100 if the batch uses no more experts than one row chooses, else 75
    (FIXED), the default of all kernels.
    """
    return T.Select(plan.used <= stack.chosen, i64(100), i64(FIXED))


def _scatter(
    stack: ExpertMatrices, plan: _Plan, part: _Part, counter: Buffer, out: tuple[Buffer, Expr, bool]
) -> None:
    """Emits the products of the pairs (row, chosen expert) with the experts' matrices, whose results are
    added to the rows of `out`; cores divide its columns. out: (buffer, number of its rows, True if it is
    first set to zero).
    """
    threads = T.bind(T.Cast("int64", T.call_packed("runtime.NumThreads")))
    parts = T.Select(plan.used <= stack.chosen, threads, threads * CHUNKS)
    parts = T.bind(T.min(parts, i64(part.tiles)))

    def unit(number: Expr) -> None:
        start, stop = (T.bind(T.truncdiv((number + i) * part.tiles, parts)) for i in range(2))
        if out[2]:
            _clear(out[0], out[1], (start * part.width, T.min(stop * part.width, i64(stack.linear.n))))
        with T.serial(0, plan.used) as place, T.serial(0, stop - start) as tile:
            _rows(plan, part, place, T.bind(start + tile), lambda pair: pair)

    shared(parts, counter, unit, _fixed(plan, stack))


def _clear(out: Buffer, rows: Expr, columns: tuple[Expr, Expr]) -> None:
    """Emits code that sets some columns of the first `rows` rows of `out` to zero. columns: (first, after the
    last)."""
    with T.serial(0, rows) as row, T.serial(0, columns[1] - columns[0]) as column:
        T.buffer_store(out, T.float32(0), [row, columns[0] + column])


def _rows(plan: _Plan, part: _Part, place: Expr, tile: Expr, row: Callable[[Expr], Expr]) -> None:
    """Emits the product of one tile (some rows) of an expert's matrix with all rows of x that have chosen the
    expert, a few of them at a time. place: index of the expert in plan.experts, the list of all experts that
    rows have chosen; tile: index of the tile in the matrix; row: function from a pair (row, chosen expert) to
    its row of x.
    """
    expert = T.bind(T.Cast("int64", plan.experts[place]))
    last = T.bind(T.Cast("int64", plan.starts[place + 1]))
    at = register(T.Cast("int64", plan.starts[place]), 1, "int64")

    def multiply(batch: int) -> None:
        pairs = [T.bind(T.Cast("int64", plan.order[T.min(at.value + i, last - 1)])) for i in range(batch)]
        part.tile(expert, tile, [T.bind(row(pair)) for pair in pairs], pairs)
        at.set(at.value + batch)

    def choose(batches: Sequence[int]) -> None:
        if len(batches) == 1:
            multiply(batches[0])
            return
        with T.If(last - at.value <= batches[0]):
            with T.Then():
                multiply(batches[0])
            with T.Else():
                choose(batches[1:])

    with T.While(at.value < last):
        choose(part.batches)
