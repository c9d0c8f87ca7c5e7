"""Emits attention of prompts in float32, for processors without tile registers: one task computes a block of
rows of a sequence, for one KV head, over all pages that they attend to.

Steps of 32 tokens start at multiples of 32 in the sequence. A step converts keys and values to float32 once
for all rows of the block. The maximum of the running softmax (Milakov and Gimelshein, 2018) is raised only
when a score exceeds it by more than SLACK, so that sums are seldom rescaled. The result of a row depends on
its own sequence only, not on the block that it is in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.attention_plan import HIDDEN, LOWEST, AttentionKernel, Call, alibi_bias
from mlcbuild.compiler.cpu.kernels.floats import Floats, registers, scratch
from mlcbuild.compiler.cpu.kernels.int8_cache import scales
from mlcbuild.compiler.cpu.kernels.vectors import prefetch

PAGES = 2
"""Number of KV cache pages in each iteration of the loop over a sequence's pages."""
TOKENS = PAGES * PAGE
SLACK = 4.0
"""Largest exponent of an attention weight: weights are at most e**4."""


@dataclass(frozen=True)
class _Task:
    """The scratch buffers of one attention task. A *vector* here is one query head of one row."""

    call: Call
    head: Expr
    query: Buffer  # [capacity, dim], scaled
    total: Buffer  # [capacity, dim], sums of weighted values so far
    denominator: Buffer  # [capacity, lanes of scores], one partial sum for each lane
    highest: Buffer  # [capacity], what is subtracted from scores: about the maximum so far
    position: Buffer  # int32 [capacity]
    slope: Buffer | None  # [capacity], slopes of ALiBi
    keys: Buffer  # [dim, TOKENS], keys of the current step
    values: Buffer  # [TOKENS, dim]
    weights: Buffer  # [rows of a register tile, TOKENS], scores and then weights of the current vectors

    @property
    def spec(self) -> AttentionKernel:
        return self.call.spec


@dataclass(frozen=True)
class _Step:
    """One step of attention over 32 tokens, two KV cache pages, from token `number` * 32 of the sequence on.
    In place of pages that no row attends to, the step reads the first or last one that a row does."""

    number: Expr
    begin: Expr
    """Number of the first page that is read, counted in the sequence."""
    stop: Expr
    """Number of the last page that is read."""
    entries: Expr
    """Index, in the page table, of the first page of the sequence."""

    def page(self, call: Call, i: Expr | int) -> Expr:
        index = T.max(self.begin, T.min(self.stop, self.number * PAGES + i))
        return T.bind(T.Cast("int64", call.page_table[self.entries + index]))


def task(call: Call, number: Expr, head: Expr) -> None:
    """Emits attention of one block of rows of a sequence, for one KV head, over all pages that the rows
    attend to. number: row of the task table `call.plan`, which states sequence, rows and pages; head: KV
    head."""
    spec = call.spec
    sequence, first, count, begin, stop = (T.bind(call.plan[number, i]) for i in range(5))
    entries = T.bind(call.page_indptr[sequence])
    state = _start(call, (first, count, head))
    rows, oldest = spec.prompt_tile[0], T.bind(T.truncdiv(begin, PAGES))
    with T.serial(T.truncdiv(stop, PAGES) - oldest + 1) as index:
        step = _Step(T.bind(oldest + index), begin, stop, entries)
        _read_keys(state, step)
        _read_values(state, step)
        base = T.bind(step.number * TOKENS)
        with T.serial(_tiles(spec, count)) as tile:
            last = T.bind(state.position[tile * rows + (rows - 1)])
            with T.If(base <= last), T.Then():
                _scores(state, tile)
                _mask(state, tile, base, last)
                _weigh(state, tile)
                _add_values(state, tile, (T.max(begin * PAGE - base, 0), T.min(TOKENS, last + 1 - base)))
    _finish(state, (first, count))


def _tiles(spec: AttentionKernel, count: Expr) -> Expr:
    rows = spec.prompt_tile[0]
    return T.truncdiv(count * spec.heads.group + (rows - 1), rows)


def _start(call: Call, block: tuple[Expr, Expr, Expr]) -> _Task:
    """Emits the start of an attention task: scratch buffers (the returned _Task) with its scaled queries and
    empty sums. The last query pads the last register tile; such results are not stored. block: (first row,
    number of rows, KV head)."""
    spec, heads, (first, count, head) = call.spec, call.spec.heads, block
    wide, narrow, room = spec.values, spec.scores, spec.prompt_capacity
    task = _Task(
        call,
        head,
        query=scratch((room, heads.dim)),
        total=scratch((room, heads.dim)),
        denominator=scratch((room, narrow.lanes)),
        highest=scratch((room,)),
        position=scratch((room,), "int32"),
        slope=scratch((room,)) if spec.alibi else None,
        keys=scratch((heads.dim, TOKENS)),
        values=scratch((TOKENS, heads.dim)),
        weights=scratch((spec.prompt_tile[0], TOKENS)),
    )
    with T.serial(_tiles(spec, count) * spec.prompt_tile[0]) as vector:
        query = T.bind(T.min(vector, count * heads.group - 1))
        row = T.bind(first + T.truncdiv(query, heads.group))
        column = T.bind((head * heads.group + T.truncmod(query, heads.group)) * heads.dim)
        with T.serial(heads.dim // wide.lanes) as k:
            value = wide.load(call.qkv, row, column + k * wide.lanes)
            wide.store(task.query, value * wide.constant(spec.scale), vector, k * wide.lanes)
            wide.store(task.total, wide.constant(0.0), vector, k * wide.lanes)
        narrow.store(task.denominator, narrow.constant(0.0), vector, 0)
        T.buffer_store(task.highest, T.float32(LOWEST), [vector])
        T.buffer_store(task.position, call.positions[row], [vector])
        if task.slope is not None and call.slopes is not None:
            slope = call.slopes[head * heads.group + T.truncmod(query, heads.group)]
            T.buffer_store(task.slope, slope, [vector])
    return task


def _read_keys(task: _Task, step: _Step) -> None:
    """Emits code that stores the keys of one step in task.keys, float32 [dim, 32], from the KV cache."""
    call, floats, heads = task.call, task.spec.scores, task.spec.heads
    with T.serial(PAGES) as i:
        page, after = step.page(call, i), step.page(call, i + PAGES)
        cache = call.pages, (call.layer, page, 0, task.head)
        factors = [scales(floats, heads, cache, part) for part in _parts(floats)] if heads.has_scales else []
        with T.serial(heads.dim) as d:
            prefetch(call.pages, (call.layer, after, 0, task.head, d * PAGE))
            for number, part in enumerate(_parts(floats)):
                keys = floats.load(call.pages, *cache[1], d * PAGE + part)
                keys = keys * factors[number] if factors else keys
                floats.store(task.keys, keys, d, i * PAGE + part)


def _parts(floats: Floats) -> range:
    """Returns the first token of each vector of a page's tokens."""
    return range(0, PAGE, floats.lanes)


def _read_values(task: _Task, step: _Step) -> None:
    """Emits code that stores the values of one step in task.values, float32 [32, dim], from the KV cache.
    Those of tokens that were never written may be NaN; they are not used."""
    call, floats, heads = task.call, task.spec.values, task.spec.heads
    with T.serial(PAGES) as i:
        page, after = step.page(call, i), step.page(call, i + PAGES)
        cache = call.pages, (call.layer, page, 1, task.head)
        with T.serial(PAGE) as token:
            factor = floats.spread(scales(floats.scalar, heads, cache, token)) if heads.has_scales else None
            with T.serial(heads.dim // floats.lanes) as k:
                at = T.bind(token * heads.dim + k * floats.lanes)
                prefetch(call.pages, (call.layer, after, 1, task.head, at))
                values = floats.load(call.pages, *cache[1], at)
                values = values if factor is None else values * factor
                floats.store(task.values, values, i * PAGE + token, k * floats.lanes)


def _scores(task: _Task, tile: Expr) -> None:
    """Emits the products query . key of a register tile of query vectors with the 32 keys of the step, and
    their stores in task.weights. tile: number of this group of query vectors."""
    spec, floats, (rows, columns) = task.spec, task.spec.scores, task.spec.prompt_tile
    dim, width = spec.heads.dim, columns * floats.lanes
    unroll = 2 if dim % 2 == 0 else 1
    with T.serial(TOKENS // width) as part:
        sums = [registers(columns, floats.lanes) for _ in range(rows)]
        for total in (total for line in sums for total in line):
            floats.store(total, floats.constant(0.0), 0)
        with T.serial(dim // unroll) as outer:
            for d in (outer * unroll + inner for inner in range(unroll)):
                keys = [
                    T.bind(floats.load(task.keys, d, part * width + column * floats.lanes))
                    for column in range(columns)
                ]
                for row, line in enumerate(sums):
                    query = floats.spread(T.bind(task.query[tile * rows + row, d]))
                    for total, key in zip(line, keys, strict=True):
                        floats.store(total, floats.fma(query, key, floats.load(total, 0)), 0)
        for row, line in enumerate(sums):
            for column, total in enumerate(line):
                floats.store(task.weights, floats.load(total, 0), row, part * width + column * floats.lanes)


def _mask(task: _Task, tile: Expr, base: Expr, last: Expr) -> None:
    """Emits the soft cap and the ALiBi biases, if the model has them, of the scores in task.weights, and sets
    those of tokens that are later than the query or have left its window to HIDDEN. tile: number of a group
    of query vectors; base: position of the step's first token; last: position of the latest query."""
    spec, floats, window, rows = task.spec, task.spec.scores, task.call.window, task.spec.prompt_tile[0]
    if spec.softcap is not None or task.slope is not None:
        with T.serial(rows) as row, T.serial(TOKENS // floats.lanes) as part:
            at = part * floats.lanes
            score = T.bind(floats.load(task.weights, row, at))
            if spec.softcap is not None:
                score = floats.soft_cap(score, spec.softcap)
            if task.slope is not None:
                vector = T.bind(tile * rows + row)
                places = base + at, T.bind(task.position[vector])
                score = score + alibi_bias(spec, T.bind(task.slope[vector]), *places)
            floats.store(task.weights, score, row, at)
    late = base + (TOKENS - 1) > task.position[tile * rows]
    gone = T.Cast("int64", last) - T.Cast("int64", base) >= window
    with T.If(T.Or(late, gone)), T.Then(), T.serial(rows) as row:
        newest = T.bind(task.position[tile * rows + row])
        oldest = T.bind(T.Cast("int32", T.max(T.Cast("int64", newest) - window, T.int64(-1))))
        for at in range(0, TOKENS, floats.lanes):
            token = T.bind(T.ramp(base + at, 1, floats.lanes) if floats.lanes > 1 else base + at)
            score = T.bind(floats.load(task.weights, row, at))
            score = T.Select(token <= floats.spread(newest), score, floats.constant(HIDDEN))
            score = T.Select(token > floats.spread(oldest), T.bind(score), floats.constant(HIDDEN))
            floats.store(task.weights, score, row, at)


def _weigh(task: _Task, tile: Expr) -> None:
    """Emits a step of the running softmax: turns scores in task.weights into weights exp(score - maximum) and
    adds them to the denominators. tile: number of a group of query vectors."""
    floats, rows = task.spec.scores, task.spec.prompt_tile[0]
    parts = range(0, TOKENS, floats.lanes)
    with T.serial(rows) as row:
        vector = T.bind(tile * rows + row)
        scores = [T.bind(floats.load(task.weights, row, at)) for at in parts]
        top = floats.scalar.opaque(floats.fold(reduce(T.max, scores), T.max))
        with T.If(top > task.highest[vector] + T.float32(SLACK)), T.Then():
            _raise(task, vector, top)
        highest = floats.spread(T.bind(task.highest[vector]))
        total = floats.load(task.denominator, vector, 0)
        for at, score in zip(parts, scores, strict=True):
            weight = floats.exp(score - highest)
            floats.store(task.weights, weight, row, at)
            total = total + weight
        floats.store(task.denominator, total, vector, 0)


def _raise(task: _Task, vector: Expr, top: Expr) -> None:
    """Emits the rescaling of one vector's sums to a new maximum, `top`."""
    wide, narrow = task.spec.values, task.spec.scores
    shrink = wide.scalar.exp(task.highest[vector] - top)
    T.buffer_store(task.highest, top, [vector])
    older = narrow.load(task.denominator, vector, 0)
    narrow.store(task.denominator, older * narrow.spread(shrink), vector, 0)
    with T.serial(task.spec.heads.dim // wide.lanes) as k:
        total = wide.load(task.total, vector, k * wide.lanes) * wide.spread(shrink)
        wide.store(task.total, total, vector, k * wide.lanes)


def _add_values(task: _Task, tile: Expr, tokens: tuple[Expr, Expr]) -> None:
    """Emits code that adds the weights of some of a step's tokens times their values to the sums of a
    register tile of query vectors, task.total. Other tokens were never written, so that their values may be
    NaN, or are older than all that the block's rows see. tile: number of this group of query vectors; tokens:
    (first token, end), counted in the step."""
    spec, floats, (rows, most) = task.spec, task.spec.values, task.spec.prompt_tile
    vectors = spec.heads.dim // floats.lanes
    columns = max(count for count in range(1, most + 1) if vectors % count == 0)
    begin, end = (T.bind(token) for token in tokens)
    with T.serial(vectors // columns) as outer:
        places = [T.bind((outer * columns + column) * floats.lanes) for column in range(columns)]
        sums = [registers(columns, floats.lanes) for _ in range(rows)]
        for row, line in enumerate(sums):
            for total, place in zip(line, places, strict=True):
                floats.store(total, floats.load(task.total, tile * rows + row, place), 0)
        with T.serial(begin, end) as token:
            values = [T.bind(floats.load(task.values, token, place)) for place in places]
            for row, line in enumerate(sums):
                weight = floats.spread(T.bind(task.weights[row, token]))
                for total, value in zip(line, values, strict=True):
                    floats.store(total, floats.fma(weight, value, floats.load(total, 0)), 0)
        for row, line in enumerate(sums):
            for total, place in zip(line, places, strict=True):
                floats.store(task.total, floats.load(total, 0), tile * rows + row, place)


def _finish(task: _Task, block: tuple[Expr, Expr]) -> None:
    """Emits the end of attention for a block of rows: adds sinks, if any, to the softmax denominators,
    divides sums of values by them and stores the results in call.out. block: (first row, number of rows)."""
    (first, count), call, heads, wide = block, task.call, task.spec.heads, task.spec.values
    narrow = task.spec.scores
    with T.serial(count * heads.group) as vector:
        head = T.bind(task.head * heads.group + T.truncmod(vector, heads.group))
        total = narrow.fold(narrow.load(task.denominator, vector, 0), lambda a, b: a + b)
        if call.sinks is not None:
            sink = narrow.scalar.load(call.sinks, head)
            total = total + narrow.scalar.exp(sink - task.highest[vector])
        share = T.bind(T.float32(1.0) / total)
        row = T.bind(first + T.truncdiv(vector, heads.group))
        with T.serial(heads.dim // wide.lanes) as k:
            value = wide.load(task.total, vector, k * wide.lanes) * wide.spread(share)
            wide.store(call.out, value, row, head * heads.dim + k * wide.lanes)
