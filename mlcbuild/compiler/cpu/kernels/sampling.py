"""Emits the kernel that samples one token from each row of logits, with a random number that the caller
passes.

A token's weight is exp((logit - the row's largest) / temperature) in float32; sums of many weights are
float64. A row's token depends only on the row's own logits and parameters: not on other rows or on the number
of threads.
"""

from __future__ import annotations

from mlcbuild_format.abi import INVALID_TOKEN, NO_TOKEN, SAMPLING_COLUMNS, SAMPLING_DTYPE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, size_var
from mlcbuild.compiler.cpu.kernels.sampling_filters import set_filters
from mlcbuild.compiler.cpu.kernels.sampling_row import (
    BLOCK,
    INVERSE_TEMPERATURE,
    TASK,
    LogitBlock,
    Read,
    Row,
    infinity,
    reading_blocks,
    sum_block,
)
from mlcbuild.compiler.cpu.kernels.vectors import i32, register, typed


def sample(isa: ISA) -> PrimFunc:
    """Returns the kernel (logits float32 [a, b, v], sampling_params float64 [q = a * b, 5], tokens int32 [q]
    out) that samples a token from each row of logits. The five parameters of a row are 1 / temperature (0:
    the first token with the largest logit is chosen), min_p as the smallest allowed difference, at most 0, of
    a logit from the row's largest one (-inf: no limit), top_p (1: no limit), top_k (0: no limit), and a
    random number from 0 to 1.

    It writes NO_TOKEN (-2) for a row whose inverse temperature is negative or NaN, INVALID_TOKEN (-1) if a
    logit is NaN or the largest one is infinite. top_p counts only the weight of tokens that min_p and top_k
    keep. top_k and top_p keep all tokens that are as likely as the least likely one that they must keep.
    """
    with kernel("sample") as function:
        rows, width = size_var("q"), size_var("v")
        # Callers also pass logits of their own, which need not be aligned.
        logits = function.tensor("logits", (size_var("outer"), size_var("inner"), width), align=4)
        sampling_params = function.tensor(
            "sampling_params", (rows, len(SAMPLING_COLUMNS)), SAMPLING_DTYPE, align=8
        )
        out = function.tensor("out", (rows,), "int32", align=4)
        with function.body(), reading_blocks():
            blocks = T.bind((width + (BLOCK - 1)) // BLOCK)
            groups = T.bind((blocks + (TASK - 1)) // TASK)
            shape = (rows, (width + (BLOCK * TASK - 1)) // (BLOCK * TASK) * TASK)
            tops, sums = (T.alloc_buffer(shape, "float32") for _ in range(2))

            def at(row: Expr) -> Row:
                tail = T.alloc_buffer((BLOCK,), "float32")
                return Row(
                    Floats(isa, isa.lanes), row, logits, sampling_params, tops, sums, tail, width, blocks
                )

            def task(index: Expr) -> None:
                row = at(T.bind(index // groups))
                with T.If(row.parameter("inverse_temperature") >= T.float64(0)), T.Then():
                    _look(row, T.bind(index % groups * TASK))

            def token(row: Expr) -> None:
                with T.If(sampling_params[row, INVERSE_TEMPERATURE] >= T.float64(0)):
                    with T.Then():
                        T.buffer_store(out, _token(at(row)), [row])
                    with T.Else():
                        T.buffer_store(out, T.int32(NO_TOKEN), [row])

            # A single row also uses both loops, because choosing between two variants would double the code.
            for count, emit in ((rows * groups, task), (rows, token)):
                with T.parallel(count) as index:
                    emit(index)
    return function.func


def _look(row: Row, first: Expr) -> None:
    """Emits the sampling kernel's first pass over up to 16 blocks of 256 logits in a row. It stores the
    largest logit of each block and, if the row is sampled at random without top_k, top_p and min_p, the sum
    over the block of exp((logit - the block's largest) / temperature). first: index of the first block.
    """
    row.fill_tail()
    is_unfiltered = T.bind(T.And(row.parameter("inverse_temperature") > T.float64(0), T.Not(row.filtered)))
    with T.serial(T.min(T.int64(TASK), row.blocks - first)) as number:
        block = T.bind(first + number)
        source = row.logit_block(block)
        _peak(row, block, source)
        with T.If(is_unfiltered), T.Then():
            highest = row.top(block)
            sum_block(row, block, lambda at: row.weight(row.floats, source.load(row.floats, at), highest))


def _peak(row: Row, block: Expr, source: LogitBlock) -> None:
    """Emits code that computes the largest logit in a block of 256, infinite if the block has a NaN, and
    stores it in `row.tops` [row, block]. `max` drops NaN, so the bit patterns without sign are compared, too.
    source: object that emits loads of the block's logits.
    """
    floats, lanes, ints = row.floats, row.floats.lanes, typed("int32", row.floats.lanes)
    most = [register(infinity(-1, lanes), lanes) for _ in range(4)]
    bits = [register(i32(0, lanes), lanes, "int32") for _ in range(4)]
    with T.serial(BLOCK // (4 * lanes)) as k:
        for part, (high, size) in enumerate(zip(most, bits, strict=True)):
            value = T.bind(source.load(floats, (k * 4 + part) * lanes))
            high.set(T.max(high.value, value))
            size.set(T.max(size.value, T.reinterpret(ints, value) & i32(0x7FFFFFFF, lanes)))
    high, size = (
        floats.fold(T.max(T.max(a.value, b.value), T.max(c.value, d.value)), T.max)
        for a, b, c, d in (most, bits)
    )
    T.buffer_store(row.tops, T.Select(size > i32(0x7F800000), infinity(1), high), [row.row, block])


def _token(row: Row) -> Expr:
    row.fill_tail()
    highest = register(infinity(-1), 1)
    with T.serial(row.blocks) as block:
        highest.set(T.max(highest.value, row.top(block)))
    most = T.bind(highest.value)
    sampled = register(i32(INVALID_TOKEN), 1, "int32")
    finite = T.And(most < infinity(1), most > infinity(-1))
    with T.If(finite), T.Then(), T.If(row.scale > T.float32(0)):
        with T.Then():
            least = register(infinity(-1), 1)
            with T.If(row.filtered):
                with T.Then():
                    set_filters(row, most, least)
                with T.Else(), T.serial(row.blocks) as block:
                    share = row.weight(row.floats.scalar, row.top(block), most)
                    T.buffer_store(row.sums, row.sums[row.row, block] * share, [row.row, block])
            sampled.set(_drawn(row, T.bind(least.value)))
        with T.Else():
            sampled.set(_first(row, most))
    return sampled.value


def _first(row: Row, most: Expr) -> Expr:
    """Emits a search for the first token of a row whose logit equals the largest one, `most`, and returns the
    token.
    """
    block, place = (register(T.int64(0), 1, "int64") for _ in range(2))
    with T.serial(row.blocks) as back:
        each = T.bind(row.blocks - 1 - back)
        block.set(T.Select(row.top(each) == most, each, block.value))
    source = row.logit_block(T.bind(block.value))
    with T.serial(BLOCK) as back:
        at = T.bind(T.int64(BLOCK - 1) - T.Cast("int64", back))
        place.set(T.Select(source.load(row.floats.scalar, at) == most, at, place.value))
    return T.Cast("int32", block.value * BLOCK + place.value)


def _drawn(row: Row, least: Expr) -> Expr:
    """Emits the random choice of a token of a row, with a probability proportional to its weight exp((logit -
    largest) / temperature), and returns the token. The row's random number decides. The sum of the weights of
    each block of 256 tokens must be in row.sums already. least: the smallest logit that may be sampled.
    """
    sums = T.alloc_buffer((BLOCK,), "float32")
    block, share = _place(row.blocks, lambda at: row.sums[row.row, at], row.parameter("random"))
    highest, source = row.top(block), row.logit_block(block)

    def weigh(at: Expr) -> None:
        logit, floats = T.bind(source.load(row.floats, at)), row.floats
        weight = T.bind(row.weight(floats, logit, highest))
        kept_weight = T.Select(logit >= floats.spread(least), weight, floats.constant(0.0))
        floats.store(sums, kept_weight, at)

    row.vectors(weigh)
    place, _ = _place(T.int64(BLOCK), lambda at: sums[at], share)
    return T.Cast("int32", block * BLOCK + place)


def _place(count: Expr, weight: Read, number: Expr) -> tuple[Expr, Expr]:
    """Emits a search through `count` weights, laid end to end. Returns (index of the weight into which
    `number` times the sum of all weights falls, position in this weight as a fraction of it). `number` is
    from 0 to 1; the index of a weight of 0 is returned only if all are 0.
    """
    total, run, before = (register(T.float64(0), 1, "float64") for _ in range(3))
    with T.serial(count) as at:
        total.set(total.value + T.Cast("float64", weight(at)))
    aim = T.bind(number * total.value)
    index, last = (register(T.int64(0), 1, "int64") for _ in range(2))
    with T.serial(count) as at:
        each = T.bind(T.Cast("float64", weight(at)))
        run.set(run.value + each)
        passed = T.bind(run.value <= aim)
        before.set(T.Select(passed, run.value, before.value))
        index.set(index.value + T.Select(passed, T.int64(1), T.int64(0)))
        last.set(T.Select(each > T.float64(0), T.Cast("int64", at), last.value))
    # Rounding can make the number exceed all weights; then it counts for the last one.
    place = T.bind(T.min(index.value, last.value))
    inside = (aim - before.value) / T.Cast("float64", weight(place))
    return place, T.bind(T.Select(index.value <= last.value, inside, T.float64(1)))
