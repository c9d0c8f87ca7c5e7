"""Emits attention of prompts on x86 tile registers (AMX): the task that attention.py runs for prompt rows.

Four pages, 64 tokens, are one step. Their keys and values are converted to tiles of bfloat16 once for all
query vectors of the task. Then, for 32 vectors at a time, tiles compute scores, vectors compute exponentials,
and tiles multiply weights with values, which are added to totals in float32. Steps start at fixed positions,
and masked tokens have a weight of exactly zero, so the result of a row depends only on its own sequence.

Tiles pair element i of 32 consecutive ones with element 16 + i, as in amx.py: for scores along the head
dimension, for values along the tokens of two pages. A float16 of the cache becomes a bfloat16 of 2**-112 of
its value by a shift of its bits, and never NaN. To compensate, queries and weights are multiplied by
2**X_EXPONENT, scores by 2**8, and results by 2**112. Other types of the cache are rounded to bfloat16."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels import amx
from mlcbuild.compiler.cpu.kernels.amx import LANES, STEP
from mlcbuild.compiler.cpu.kernels.attention_plan import HIDDEN, LOWEST, PAIR, Call
from mlcbuild.compiler.cpu.kernels.bf16_math import Rough
from mlcbuild.compiler.cpu.kernels.floats import scratch
from mlcbuild.compiler.cpu.kernels.int8_cache import scales, stored
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, intrinsic, lane_sums, prefetch, span, splat, typed

AHEAD = 4
"""Number of rows by which the reading of queries from qkv is prefetched: the rows of one head are too far
apart for the hardware prefetcher."""
PAGES = 4
"""Number of KV cache pages in each iteration of the loop over a sequence's pages."""
TOKENS = PAGES * PAGE
SLACK = 4.0
"""Largest base-2 exponent of an attention weight: the running maximum is raised only when a score exceeds it
by more. Sums of 2**18 weights are finite in float32, even times 2**104, as with a float16 cache."""
_SLACK_BITS = int(np.float32(SLACK).view(np.int32))


@dataclass(frozen=True)
class _Sums:
    """The running softmax of one attention task (some rows of a sequence for one KV head): for each query
    vector, the sums of weighted values, the denominators and the maximum, which every step of 64 tokens
    updates."""

    total: Buffer  # float32 [capacity, dim], weighted sums of values so far
    denominator: Buffer  # float32 [capacity, 16], one partial sum for each lane
    highest: Buffer  # float32 [capacity], what is subtracted from scores: about the maximum so far


@dataclass(frozen=True)
class _Task:
    """The scratch buffers of one attention task on AMX tiles, which computes some rows of a sequence for one
    KV head. In this module a *vector* is one query head of one row."""

    call: Call
    head: Expr
    query: Buffer  # int32 [capacity / 16, dim / 32, 16, 16], pairs of bfloat16
    sums: _Sums
    position: Buffer  # int32 [capacity]
    keys: Buffer  # int32 [PAGES, dim / 32, 16, 16], keys of the current step
    values: Buffer  # int32 [PAGES / 2, dim / 16, 16, 16]
    scores: Buffer  # float32 [PAIR, TOKENS], scores of the current vectors
    weights: Buffer  # int32 [2, PAGES / 2, 16, 16]
    start: Buffer  # float32 [16], of each current vector: where exponents start, or what sums shrink to

    packed: amx.Packed | None  # where results go as tiles

    @property
    def floats(self) -> Rough:
        return Rough(self.call.spec.isa, LANES)

    @property
    def dim(self) -> int:
        return self.call.spec.heads.dim

    @property
    def shifted(self) -> bool:
        return self.call.spec.heads.dtype == "float16"

    @property
    def raised(self) -> int:
        """Returns the exponent e of the factor 2**e by which queries and attention weights are multiplied
        before they are rounded to bfloat16; 0 unless the KV cache is float16.
        """
        return amx.X_EXPONENT if self.shifted else 0

    @property
    def unit(self) -> float:
        """Returns the factor by which scores, as AMX tiles compute them, are multiplied to get q . k times
        the attention scale; 1.0 unless the KV cache is float16."""
        return 2.0 ** (112 - self.raised) if self.shifted else 1.0

    @property
    def capped_unit(self) -> float:
        """Returns the factor by which scores are multiplied after soft-capping: `unit`, or 1.0 if the model
        caps scores, since they are multiplied by `unit` before the cap."""
        return self.unit if self.call.spec.softcap is None else 1.0


@dataclass(frozen=True)
class _Step:
    """One step of attention over 64 tokens, four KV cache pages, from token `number` * 64 of the sequence on.
    begin, stop: numbers of the first and the last page that is read, counted in the sequence. In place of
    pages outside this range, the step reads page `begin` or `stop`, and masks the scores."""

    number: Expr
    begin: Expr
    stop: Expr
    end: Expr
    """Position, in the sequence, after the last token that the task's rows attend to."""
    entries: Expr
    """Index, in the page table, of the first page of the sequence."""

    def page(self, call: Call, i: Expr | int) -> Expr:
        index = T.max(self.begin, T.min(self.stop, self.number * PAGES + i))
        return T.bind(T.Cast("int64", call.page_table[self.entries + index]))


def task(call: Call, number: Expr, head: Expr) -> None:
    """Emits attention of one block of rows of a sequence, for one KV head, over all pages that the rows
    attend to. number: row of the task table `call.plan`, which states sequence, rows and pages; head: KV
    head."""
    sequence, first, count, begin, stop, end = (T.bind(call.plan[number, i]) for i in range(6))
    entries = T.bind(call.page_indptr[sequence])
    task_state = _start(call, (first, count, head))
    pairs = T.bind(T.truncdiv(count * call.spec.heads.group + (PAIR - 1), PAIR))
    amx.configure()
    oldest = T.bind(T.truncdiv(begin, PAGES))
    with T.serial(T.truncdiv(stop, PAGES) - oldest + 1) as index:
        step = _Step(T.bind(oldest + index), begin, stop, end, entries)
        _read_keys(task_state, step)
        _read_values(task_state, step)
        with T.serial(pairs) as pair:
            last = T.bind(task_state.position[pair * PAIR + (PAIR - 1)])
            with T.If(step.number * TOKENS <= last), T.Then():
                _scores(task_state, pair)
                _hide(task_state, pair, step.number * TOKENS, last)
                _weigh(task_state, pair)
                _add_values(task_state, pair)
    amx.instruction("tilerelease")
    _finish(task_state, (first, count))


def _start(call: Call, block: tuple[Expr, Expr, Expr]) -> _Task:
    """Emits code that prepares an attention task on AMX: scratch buffers (the returned _Task) with the
    queries of its rows as bfloat16 tiles and empty sums. Query vectors that fill the last group of 32 repeat
    the last query; their results are not stored. block: (first row, number of rows, KV head)."""
    (first, count, head), spec, heads = block, call.spec, call.spec.heads
    room, dim = spec.prompt_capacity, heads.dim
    task = _Task(
        call,
        head,
        query=scratch((room // LANES, dim // STEP, LANES, LANES), "int32"),
        sums=_Sums(scratch((room, dim)), scratch((room, LANES)), scratch((room,))),
        position=scratch((room,), "int32"),
        keys=scratch((PAGES, dim // STEP, LANES, LANES), "int32"),
        values=scratch((PAGES // 2, dim // LANES, LANES, LANES), "int32"),
        scores=scratch((PAIR, TOKENS)),
        weights=scratch((2, PAGES // 2, LANES, LANES), "int32"),
        start=scratch((LANES,)),
        packed=_packed(call),
    )
    factor, floats = f32(spec.scale * 2.0**task.raised, LANES), task.floats
    with T.serial(room) as vector:
        query = T.bind(T.min(vector, count * heads.group - 1))
        row = T.bind(first + T.truncdiv(query, heads.group))
        column = T.bind((head * heads.group + T.truncmod(query, heads.group)) * dim)
        for at in range(0, dim, LANES):
            prefetch(call.qkv, (row + AHEAD, column + at))
            if task.packed is None:
                prefetch(call.out, (row, column + at), locality=2, write=True)
        with T.serial(dim // STEP) as part:
            halves = [floats.load(call.qkv, row, column + part * STEP + h) * factor for h in (0, LANES)]
            place = T.truncdiv(vector, LANES), part, T.truncmod(vector, LANES)
            T.buffer_store(task.query, amx.rounded(*halves), [*place, span(0, LANES)])
            for half in (0, LANES):
                floats.store(task.sums.total, f32(0, LANES), vector, part * STEP + half)
        floats.store(task.sums.denominator, f32(0, LANES), vector, 0)
        T.buffer_store(task.sums.highest, T.float32(LOWEST), [vector])
        T.buffer_store(task.position, call.positions[row], [vector])
    return task


def _packed(call: Call) -> amx.Packed | None:
    heads = call.spec.heads
    if not call.spec.columns:
        return None
    return amx.Packed.inside(call.out, heads.query * heads.dim, call.out.shape[0])


def _read_keys(task: _Task, step: _Step) -> None:
    """Emits code that converts the keys of 64 tokens, one step of attention, from the KV cache to bfloat16
    tiles in task.keys, int32 [4, dim / 32, 16, 16], with a column for each token."""
    call = task.call
    with T.serial(PAGES) as i:
        page, after = step.page(call, i), step.page(call, i + PAGES)
        cache, heads = (call.pages, (call.layer, page, 0, task.head)), call.spec.heads
        factors = scales(task.floats, heads, cache, 0) if heads.has_scales else None
        with T.serial(task.dim // STEP) as part, T.serial(LANES) as line:
            low, high = (T.bind((part * STEP + half + line) * PAGE) for half in (0, LANES))
            for at in (low, high):
                prefetch(call.pages, (call.layer, after, 0, task.head, at))
            halves = [stored(task.floats, cache, at, factors) for at in (low, high)]
            T.buffer_store(task.keys, _paired(task, halves, None), [i, part, line, span(0, LANES)])


def _read_values(task: _Task, step: _Step) -> None:
    """Emits code that reads the value vectors of 64 tokens from the KV cache and stores them as bfloat16 AMX
    tiles in `task.values`; each column of a tile holds one element of the vectors. Memory of tokens that were
    never written may hold NaN, which would survive a weight of zero, so zeros replace it, except with a
    float16 cache, whose conversion makes no NaN."""
    call = task.call
    with T.serial(PAGES // 2) as pair:
        pages = [step.page(call, pair * 2 + i) for i in range(2)]
        ahead = [step.page(call, pair * 2 + i + PAGES) for i in range(2)]
        with T.serial(LANES) as token, T.serial(task.dim // LANES) as column:
            at = T.bind(token * task.dim + column * LANES)
            for page in ahead:
                prefetch(call.pages, (call.layer, page, 1, task.head, at))
            halves = [_value(task, page, token, at) for page in pages]
            start = step.number * TOKENS + pair * (2 * PAGE) + token
            written = None if task.shifted else [start + i * PAGE < step.end for i in range(2)]
            T.buffer_store(task.values, _paired(task, halves, written), [pair, column, token, span(0, LANES)])


def _value(task: _Task, page: Expr, token: Expr, at: Expr) -> Expr:
    """Emits the load of 16 consecutive elements of one token's value vector, and returns them in their stored
    type or, if they are int8, times the token's scale as float32. page: index of the KV cache page; token:
    index of the token in the page; at: index of the first element among all values of the page's 16 tokens.
    """
    call, floats = task.call, task.floats
    cache = call.pages, (call.layer, page, 1, task.head)
    heads = call.spec.heads
    factors = floats.spread(scales(floats.scalar, heads, cache, token)) if heads.has_scales else None
    return stored(floats, cache, at, factors)


def _paired(task: _Task, halves: list[Expr], written: list[Expr] | None) -> Expr:
    """Emits the conversion of two vectors of 16 numbers from the KV cache to bfloat16, float16 ones to
    2**-112 of their value, and returns int32 lanes with the first of `halves` in the low bits and the second
    in the high ones. written: for each vector, the condition without which zeros replace it; None: never."""
    low, high = halves
    if not task.shifted:
        if written is not None:
            low, high = (
                T.Select(splat(k, LANES), v, f32(0, LANES)) for k, v in zip(written, (low, high), strict=True)
            )
        return amx.rounded(low, high)
    wide = [T.Cast(typed("int32", LANES), T.reinterpret("uint16x16", half)) for half in (low, high)]
    bits = T.reinterpret("int16x32", wide[0] | (wide[1] << i32(16, LANES))) + splat(T.int16(4), 32)
    cut = (bits >> splat(T.int16(3), 32)) & splat(T.int16(0x8FFF - 0x10000), 32)
    return T.reinterpret(typed("int32", LANES), cut)


def _scores(task: _Task, pair: Expr) -> None:
    """Emits the products query . key of 32 query vectors with the 64 keys in task.keys, and their stores in
    task.scores, float32 [32, 64]. pair: index of this group of 32 vectors."""
    with T.serial(PAGES // 2) as pages:
        for number in range(4):
            amx.instruction("tilezero", T.int8(number))
        for part in range(task.dim // STEP):
            for j in range(2):
                amx.move("tileloadd64", 6 + j, task.keys, (pages * 2 + j, part, 0, 0), 64)
            for i in range(2):
                amx.move("tileloadd64", 4 + i, task.query, (pair * 2 + i, part, 0, 0), 64)
                for j in range(2):
                    amx.instruction("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
        for i in range(2):
            for j in range(2):
                place = (i * LANES, (pages * 2 + j) * PAGE)
                amx.move("tilestored64", 2 * i + j, task.scores, place, 4 * TOKENS)


def _hide(task: _Task, pair: Expr, first: Expr, last: Expr) -> None:
    """Emits the soft cap of the scores of 32 query vectors for 64 tokens, if the model has one, and sets
    scores of tokens that are later than the query or have left its window to HIDDEN. first: position of the
    first of these tokens; last: position of the latest query; pair: index of this group of 32 vectors."""
    floats, softcap, window = task.floats, task.call.spec.softcap, task.call.window
    if softcap is not None:
        with T.serial(PAIR) as row, T.serial(PAGES) as i:
            score = T.bind(floats.load(task.scores, row, i * PAGE) * f32(task.unit, LANES))
            floats.store(task.scores, floats.soft_cap(score, softcap), row, i * PAGE)
    late = first + (TOKENS - 1) > task.position[pair * PAIR]
    hides = T.Or(late, T.Cast("int64", last) - T.Cast("int64", first) >= window)
    with T.If(hides), T.Then(), T.serial(PAIR) as row:
        newest = T.bind(task.position[pair * PAIR + row])
        oldest = T.bind(T.Cast("int32", T.max(T.Cast("int64", newest) - window, T.int64(-1))))
        for i in range(PAGES):
            token = T.bind(T.ramp(first + i * PAGE, 1, LANES))
            score = T.bind(floats.load(task.scores, row, i * PAGE))
            score = T.Select(token <= splat(newest, LANES), score, f32(HIDDEN, LANES))
            score = T.Select(token > splat(oldest, LANES), T.bind(score), f32(HIDDEN, LANES))
            floats.store(task.scores, score, row, i * PAGE)


def _weigh(task: _Task, pair: Expr) -> None:
    """Emits code that computes the weights exp(score - maximum), times 2**task.raised, of 32 query vectors
    for 64 tokens as bfloat16 tiles, adds them to the denominators, and rescales the sums of vectors whose
    maximum rises. pair: index of this group of 32 vectors."""
    floats = task.floats
    slope = f32(math.log2(math.e) * task.capped_unit, LANES)
    with T.serial(PAIR // LANES) as half:
        first = T.bind(pair * PAIR + half * LANES)
        _raise(task, half, first, slope)
        highest = floats.load(task.sums.highest, first)
        start = T.bind(f32(task.raised, LANES) - highest * slope)
        floats.store(task.start, start, 0)
        with T.serial(LANES) as row:
            start = T.bind(floats.spread(task.start[row]))
            scores = [floats.load(task.scores, half * LANES + row, i * PAGE) for i in range(PAGES)]
            parts = [floats.exp2(floats.fma(score, slope, start)) for score in scores]
            sums = (parts[0] + parts[1]) + (parts[2] + parts[3])
            floats.store(
                task.sums.denominator,
                floats.load(task.sums.denominator, first + row, 0) + sums,
                first + row,
                0,
            )
            for i in range(PAGES // 2):
                line = amx.rounded(parts[2 * i], parts[2 * i + 1])
                T.buffer_store(task.weights, line, [half, T.int32(i), row, span(0, LANES)])


def _raise(task: _Task, half: Expr, first: Expr, slope: Expr) -> None:
    """Emits an update of the running softmax of 16 query vectors (one head of one row each). Where a score
    exceeds its vector's maximum by more than SLACK, a base-2 exponent, the code raises the maximum and
    rescales the vector's sums. half: 0 or 1, which half of 32 vectors; first: index of the half's first
    vector; slope: 16 lanes with the factor from scores to base-2 exponents."""
    floats = task.floats
    tops = []
    for row in range(LANES):
        scores = [T.bind(floats.load(task.scores, half * LANES + row, i * PAGE)) for i in range(PAGES)]
        tops.append(T.bind(T.max(T.max(scores[0], scores[1]), T.max(scores[2], scores[3]))))
    highest_score = T.bind(lane_sums(tops, LANES, T.max))
    highest = T.bind(floats.load(task.sums.highest, first))
    above = T.bind((highest_score - highest) * slope)
    # As integers, the bits of positive floats have the same order; LLVM makes a chain of scalars of a maximum
    # of floats.
    bits = T.reinterpret(typed("int32", LANES), above)
    rises = intrinsic("int32", "llvm.vector.reduce.smax", bits) > T.int32(_SLACK_BITS)
    with T.If(rises), T.Then():
        far = above > f32(SLACK, LANES)
        shrink = floats.exp2(T.bind(f32(0, LANES) - above))
        floats.store(task.sums.highest, T.Select(far, highest_score, highest), first)
        floats.store(task.start, T.Select(far, shrink, f32(1, LANES)), 0)
        with T.serial(LANES) as row:
            share, vector = T.bind(floats.spread(task.start[row])), T.bind(first + row)
            floats.store(
                task.sums.denominator, floats.load(task.sums.denominator, vector, 0) * share, vector, 0
            )
            with T.serial(task.dim // LANES) as k:
                total = floats.load(task.sums.total, vector, k * LANES) * share
                floats.store(task.sums.total, total, vector, k * LANES)


def _add_values(task: _Task, pair: Expr) -> None:
    """Emits code that adds the attention weights of 64 tokens times their values to the running sums of 32
    query vectors, task.sums.total. pair: index of this group of 32 vectors."""
    with T.serial(task.dim // STEP) as part:
        corners = [(pair * PAIR + i * LANES, part * STEP + j * LANES) for i in range(2) for j in range(2)]
        for number, corner in enumerate(corners):
            amx.move("tileloadd64", number, task.sums.total, corner, 4 * task.dim)
        for k in range(PAGES // 2):
            for j in range(2):
                amx.move("tileloadd64", 6 + j, task.values, (k, part * 2 + j, 0, 0), 64)
            for i in range(2):
                amx.move("tileloadd64", 4 + i, task.weights, (i, k, 0, 0), 64)
                for j in range(2):
                    amx.instruction("tdpbf16ps", T.int8(2 * i + j), T.int8(4 + i), T.int8(6 + j))
        for number, corner in enumerate(corners):
            amx.move("tilestored64", number, task.sums.total, corner, 4 * task.dim)


def _finish(task: _Task, block: tuple[Expr, Expr]) -> None:
    """Emits code that divides the sums of weighted values, float32 [vectors, dim], by the denominators and
    stores the attention output of a block's rows in call.out, as float32 or as AMX tiles. block: (first row,
    number of rows)."""
    (first, count), heads, floats = block, task.call.spec.heads, task.floats
    factor = T.float32(2.0**112 if task.shifted else 1.0)
    with T.serial(count * heads.group) as vector:
        sums = floats.load(task.sums.denominator, vector, 0)
        share = T.bind(factor / floats.fold(sums, lambda a, b: a + b))
        column = T.bind((task.head * heads.group + T.truncmod(vector, heads.group)) * heads.dim)
        row = T.bind(first + T.truncdiv(vector, heads.group))
        with T.serial(heads.dim // STEP) as part:
            at = part * STEP
            low, high = (
                floats.load(task.sums.total, vector, at + half) * floats.spread(share) for half in (0, LANES)
            )
            if task.packed is not None:
                task.packed.put(T.Cast("int64", row), T.Cast("int64", column // STEP + part), low, high)
            else:
                floats.store(task.call.out, low, row, column + at)
                floats.store(task.call.out, high, row, column + at + LANES)
