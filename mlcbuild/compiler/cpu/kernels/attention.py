"""Emits causal attention over the paged KV cache: one kernel for decoding, prefilling, and both in one batch.

The rows of a sequence are divided into blocks. A task is (block, kv head) and computes the block's rows for
every query head that shares the kv head, so that a key or value is read once for all of them. Pages are
visited once, with the running maximum and denominator of Milakov and Gimelshein (2018). Nothing depends on
the number of sequences, pages or rows at compile time.

A sequence with at most FEW rows, as in decoding, is also divided along its pages, because there are too few
heads to keep all cores busy. Parts start at fixed positions, so the result of a row depends only on its own
sequence. The parts' sums are combined at the end, as in flash decoding (Dao et al., 2023).

If the kernel's argument `prompt` is not 0, all rows of a batch are computed by larger tasks instead: in
float32 (attention_prompt.py), or rounded to bfloat16 by the tile registers of a CPU with AMX
(attention_amx.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.kernels import attention_amx, attention_prompt
from mlcbuild.compiler.cpu.kernels.attention_plan import (
    FEW,
    HIDDEN,
    LOWEST,
    PART,
    AttentionKernel,
    Call,
    alibi_bias,
    folded,
    join,
    plan,
    task_place,
)
from mlcbuild.compiler.cpu.kernels.cores import before_others, counter, one_launch, shared
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, registers, scratch, size_var
from mlcbuild.compiler.cpu.kernels.int8_cache import scaled
from mlcbuild.compiler.cpu.kernels.vectors import prefetch

_Place = tuple[Buffer, Expr, Expr, Expr]
"""The place of keys or values in the KV cache: (buffer of all pages, layer, page's index in it, KV head)."""
_Ahead = tuple[Expr, Expr]
"""A page to prefetch: (condition under which it is prefetched, its index in the buffer of all pages)."""


@dataclass(frozen=True)
class _Task:
    """The scratch buffers of one attention task, which computes a block of rows of a sequence for one KV
    head: queries, weights, and sums of the running softmax. A *vector* here is one query head of one row."""

    spec: AttentionKernel
    query: Buffer  # [capacity, dim], scaled
    total: Buffer  # [capacity, value_dim], weighted sum of values so far
    weight: Buffer  # [capacity, PAGE], weights of the current page
    denominator: Buffer  # [capacity, PAGE], one partial sum for each lane
    highest: Buffer  # [capacity], maximum so far
    shrink: Buffer  # [capacity], factor for the older sums
    position: Buffer  # int32 [capacity]
    slope: Buffer | None  # [capacity], slopes of ALiBi


def attention(spec: AttentionKernel) -> PrimFunc:
    """Returns the attention kernel for n rows of b sequences: (qkv float32 [n, width] with rotated queries,
    pages [layers, pages, keys and values, KV heads, 16 * head_dim], q_indptr int32 [b+1], page_indptr int32
    [b+1], page_table int32 [p], kv_lengths int32 [b], positions int32 [n], layer int64, window int64 (tokens
    that a query sees), prompt int64 unless keys are latents, slopes float32 [heads] only with ALiBi, sinks
    [heads] only with sinks, out float32 [n, columns]). If `prompt` is not 0, rows are computed as those of
    prompts. AMX stores them as bfloat16 tiles if `out` is wider than heads * value_dim."""
    heads = spec.heads
    with kernel("paged_attention", simplified=False) as function:
        rows, batch, table = size_var("n"), size_var("b"), size_var("p")
        tensors = (
            function.tensor("qkv", (rows, heads.width)),
            function.tensor("pages", heads.cache_shape(size_var("num_pages")), heads.dtype),
            function.tensor("q_indptr", (batch + 1,), "int32"),
            function.tensor("page_indptr", (batch + 1,), "int32"),
            function.tensor("page_table", (table,), "int32"),
            function.tensor("kv_lengths", (batch,), "int32"),
            function.tensor("positions", (rows,), "int32"),
        )
        layer, window = function.number("layer"), function.number("window")
        prompt = function.number("prompt") if spec.has_prompt_variant else None
        slopes = function.tensor("slopes", (heads.query,)) if spec.alibi else None
        sinks = function.tensor("sinks", (heads.query,), spec.sinks) if spec.sinks else None
        out = function.tensor("out", (rows, spec.columns or heads.query * heads.value_dim))
        with function.body():
            # A sequence of p pages has at most p // PART + 1 parts.
            parts = table // PART + batch
            lines = parts * FEW * heads.query
            tasks = parts * -(-FEW // spec.block) + rows // spec.block + batch
            shapes = ((lines, heads.value_dim), (lines,), (lines,))
            room = [T.alloc_buffer(shape, "float32") for shape in shapes]
            tables = [T.alloc_buffer(shape, "int32") for shape in ((tasks, 7), (batch, 2))]
            layer_arguments = (layer, window, prompt, slopes, sinks)
            call = Call(spec, *tensors, batch, *layer_arguments, out, *room, *tables)
            total = plan(call)
            if prompt is None:
                _any_rows(call, rows, total)
            else:
                with T.If(prompt == 0):
                    with T.Then():
                        _any_rows(call, rows, total)
                    with T.Else():
                        _prompts(call, total)
    return function.func


def _any_rows(call: Call, rows: Expr, total: Expr) -> None:
    tasks, number = counter(), total * call.spec.heads.kv
    with one_launch():
        with before_others():
            shared(number, tasks, lambda index: _task(call, *task_place(call, rows, total, index)))
        with T.parallel(call.batch) as sequence:
            join(call, T.Cast("int32", sequence))


def _prompts(call: Call, total: Expr) -> None:
    with T.parallel(total * call.spec.heads.kv) as index:
        number = T.bind(folded(T.bind(T.truncmod(index, total)), total))
        task = (attention_amx if call.spec.uses_tiles else attention_prompt).task
        task(call, number, T.bind(T.truncdiv(index, total)))


def _task(call: Call, number: Expr, head: Expr) -> None:
    """Emits attention of one block of rows of a sequence, for one KV head, over all pages that they attend
    to, or with few rows over a part of them. number: row of the task table `call.plan`; head: KV head."""
    spec = call.spec
    sequence, first, count, begin, stop, end, line = (T.bind(call.plan[number, i]) for i in range(7))
    task = _start(call, (first, count, head))
    with T.serial(stop - begin + 1) as step:
        base = T.bind((begin + step) * PAGE)
        listed = T.bind(call.page_indptr[sequence] + begin + step)
        page = T.bind(T.Cast("int64", call.page_table[listed]))
        following = T.min(listed + 1, call.page_indptr[call.batch] - 1)
        after = T.bind(T.Cast("int64", call.page_table[following]))
        tokens = T.bind(T.min(PAGE, end - base))
        with T.serial(_tiles(spec, count)) as tile:
            _scores(task, (call.pages, call.layer, page, head), tile, (tile == 0, after))
            _weights(task, (call.pages, call.layer, page, head), tile, base, call.window)
            _values(task, (call.pages, call.layer, page, head), tile, tokens, (tile == 0, after))
    with T.If(line < 0):
        with T.Then():
            _finish(task, call, (first, count, head))
        with T.Else():
            _keep(task, call, line, (count, head))


def _tiles(spec: AttentionKernel, count: Expr) -> Expr:
    return (count * spec.heads.group + spec.tile - 1) // spec.tile


def _start(call: Call, block: tuple[Expr, Expr, Expr]) -> _Task:
    """Emits the start of an attention task: scratch buffers, returned as a _Task, with its scaled queries and
    empty sums. The last query pads the last tile. block: (first row, number of rows, KV head)."""
    spec, qkv, (first, count, head) = call.spec, call.qkv, block
    heads, wide, narrow, room = spec.heads, spec.values, spec.scores, spec.capacity
    task = _Task(
        spec,
        query=scratch((room, heads.dim)),
        total=scratch((room, heads.value_dim)),
        weight=scratch((room, PAGE)),
        denominator=scratch((room, PAGE)),
        highest=scratch((room,)),
        shrink=scratch((room,)),
        position=scratch((room,), "int32"),
        slope=scratch((room,)) if spec.alibi else None,
    )
    with T.serial(_tiles(spec, count) * spec.tile) as vector:
        query = T.bind(T.min(vector, count * heads.group - 1))
        row = T.bind(first + query // heads.group)
        column = T.bind((head * heads.group + query % heads.group) * heads.dim)
        with T.serial(heads.dim // wide.lanes) as k:
            value = wide.load(qkv, row, column + k * wide.lanes)
            wide.store(task.query, value * wide.constant(spec.scale), vector, k * wide.lanes)
            if not heads.latent:
                wide.store(task.total, wide.constant(0.0), vector, k * wide.lanes)
        if heads.latent:
            with T.serial(heads.latent // wide.lanes) as k:
                wide.store(task.total, wide.constant(0.0), vector, k * wide.lanes)
        for part in range(0, PAGE, narrow.lanes):
            narrow.store(task.denominator, narrow.constant(0.0), vector, part)
        T.buffer_store(task.highest, T.float32(LOWEST), [vector])
        T.buffer_store(task.position, call.positions[row], [vector])
        if task.slope is not None and call.slopes is not None:
            T.buffer_store(task.slope, call.slopes[head * heads.group + query % heads.group], [vector])
    return task


def _fetch(task: _Task, place: _Place, ahead: _Ahead, kind: int, span: tuple[Expr, int]) -> None:
    """Emits prefetches of keys (kind 0) or values (kind 1) of a later page, whose place the hardware cannot
    predict, for the layer and KV head of `place`, the location of the current page. ahead: (condition, index
    of the later page); span: (first element within the page, number of elements)."""
    (pages, layer, _, head), (condition, page), (start, count) = place, ahead, span
    line = 64 // task.spec.heads.item_bytes
    with T.If(condition), T.Then():
        for at in range(0, count, line):
            prefetch(pages, (layer, page, kind, head, start + at), locality=2)


def _scores(task: _Task, place: _Place, tile: Expr, ahead: _Ahead) -> None:
    """Emits the dot products of some query vectors (one head of one row each) with the 16 keys of a page, and
    their stores in task.weight, float32 [query vectors, 16]. tile: number of this group of spec.tile query
    vectors; place: location of the page; ahead: the page that is prefetched meanwhile."""
    if task.spec.heads.latent:
        _latent_scores(task, place, tile, ahead)
        return
    spec, floats = task.spec, task.spec.scores
    pages, layer, page, head = place
    dim, parts = spec.heads.dim, PAGE // floats.lanes
    # At least eight independent sums, to hide the latency of multiply-add.
    split = 2 if parts * spec.tile < 8 and dim % 2 == 0 else 1
    unroll = 4 if dim % 4 == 0 else split
    sums = [[registers(parts, floats.lanes) for _ in range(spec.tile)] for _ in range(split)]
    for total in (total for bank in sums for row in bank for total in row):
        floats.store(total, floats.constant(0.0), 0)
    for kind in range(spec.heads.kinds * spec.heads.has_scales):
        _fetch(task, place, ahead, kind, (T.int64(PAGE * dim), 64))
    with T.serial(dim // unroll) as outer:
        _fetch(task, place, ahead, 0, (outer * unroll * PAGE, unroll * PAGE))
        for inner in range(unroll):
            d = outer * unroll + inner
            keys = [
                T.bind(floats.load(pages, layer, page, 0, head, d * PAGE + part * floats.lanes))
                for part in range(parts)
            ]
            for row in range(spec.tile):
                query = floats.spread(T.bind(task.query[tile * spec.tile + row, d]))
                for total, key in zip(sums[inner % split][row], keys, strict=True):
                    floats.store(total, floats.fma(query, key, floats.load(total, 0)), 0)
    for row in range(spec.tile):
        for part in range(parts):
            value = floats.load(sums[0][row][part], 0)
            if split == 2:
                value = value + floats.load(sums[1][row][part], 0)
            value = scaled(floats, spec.heads, (pages, (layer, page, 0, head)), part * floats.lanes, value)
            floats.store(task.weight, value, tile * spec.tile + row, part * floats.lanes)


def _latent_scores(task: _Task, place: _Place, tile: Expr, ahead: _Ahead) -> None:
    """Emits the dot products of a register tile of query vectors with the 16 keys of a page in latent
    attention, whose keys are latent vectors, and their stores in task.weight. Parameters: as for _scores."""
    spec, floats, (pages, layer, page, head) = task.spec, task.spec.values, place
    dim, rows = spec.heads.dim, [tile * spec.tile + row for row in range(spec.tile)]
    sums = [registers(1, floats.lanes)[0] for _ in rows]
    with T.serial(PAGE) as token:
        _fetch(task, place, ahead, 0, (token * dim, dim))
        for total in sums:
            floats.store(total, floats.constant(0.0), 0)
        with T.serial(dim // floats.lanes) as k:
            at = k * floats.lanes
            key = T.bind(floats.load(pages, layer, page, 0, head, token * dim + at))
            for row, total in zip(rows, sums, strict=True):
                query = floats.load(task.query, row, at)
                floats.store(total, floats.fma(query, key, floats.load(total, 0)), 0)
        for row, total in zip(rows, sums, strict=True):
            score = floats.fold(floats.load(total, 0), lambda a, b: a + b)
            T.buffer_store(task.weight, score, [row, token])


def _weights(task: _Task, place: _Place, tile: Expr, base: Expr, window: Expr) -> None:
    """Emits a step of the running softmax for the 16 tokens of a page: turns scores in task.weight into
    weights exp(score - maximum), times the scales of int8 values, and updates in `task` maximum, denominator
    and `shrink`, a factor that rescales older sums to the new maximum. tile: number of a group of spec.tile
    query vectors; base: position of the page's first token; window: tokens that a query sees."""
    spec, floats, (pages, layer, page, head) = task.spec, task.spec.scores, place
    with T.serial(spec.tile) as inner:
        row = T.bind(tile * spec.tile + inner)
        scores = [_visible_scores(task, row, (base, part), window) for part in range(0, PAGE, floats.lanes)]
        highest = floats.scalar.opaque(T.max(task.highest[row], floats.fold(reduce(T.max, scores), T.max)))
        shrink = floats.scalar.exp(task.highest[row] - highest)
        T.buffer_store(task.highest, highest, [row])
        T.buffer_store(task.shrink, shrink, [row])
        for part, score in zip(range(0, PAGE, floats.lanes), scores, strict=True):
            weight = floats.exp(score - floats.spread(highest))
            shares = scaled(floats, spec.heads, (pages, (layer, page, 1, head)), part, weight)
            floats.store(task.weight, shares, row, part)
            older = floats.load(task.denominator, row, part)
            floats.store(task.denominator, floats.fma(older, floats.spread(shrink), weight), row, part)


def _visible_scores(task: _Task, row: Expr, tokens: tuple[Expr, int], window: Expr) -> Expr:
    """Returns the scores of query vector `row` for one vector of tokens, soft-capped and biased. tokens:
    (position of the page's first token, index in the page of the vector's first token). A token that is later
    than the query, or has left the window, gets HIDDEN, which acts as minus infinity."""
    spec, floats, (base, part) = task.spec, task.spec.scores, tokens
    score = T.bind(floats.load(task.weight, row, part))
    if spec.softcap is not None:
        score = T.bind(floats.soft_cap(score, spec.softcap))
    newest = T.bind(task.position[row])
    if task.slope is not None:
        slope = T.bind(task.slope[row])
        score = T.bind(score + alibi_bias(spec, slope, base + part, newest))
    oldest = T.bind(T.Cast("int32", T.max(T.Cast("int64", newest) - window, T.int64(-1))))
    token = T.bind(T.ramp(base + part, 1, floats.lanes) if floats.lanes > 1 else base + part)
    late = T.Select(token <= floats.spread(newest), score, floats.constant(HIDDEN))
    return T.bind(T.Select(token > floats.spread(oldest), late, floats.constant(HIDDEN)))


def _values(task: _Task, place: _Place, tile: Expr, tokens: Expr, ahead: _Ahead) -> None:
    """Emits total = total * shrink + weight . values, the running sum, for the first `tokens` tokens of a
    page. Memory of later tokens may hold NaN, which would reach the sum even with a weight of zero. tile:
    number of a group of spec.tile query vectors; place: location of the page; ahead: the page to prefetch."""
    spec, floats, (pages, layer, page, head) = task.spec, task.spec.values, place
    vectors, dim, kind = range(spec.value_vectors), spec.heads.dim, spec.heads.kinds - 1
    rows = [tile * spec.tile + row for row in range(spec.tile)]
    with T.serial(spec.heads.value_dim // (floats.lanes * spec.value_vectors)) as outer:
        start = T.bind(outer * floats.lanes * spec.value_vectors)
        sums = [registers(spec.value_vectors, floats.lanes) for _ in rows]
        for row, bank in zip(rows, sums, strict=True):
            shrink = floats.spread(T.bind(task.shrink[row]))
            for v in vectors:
                floats.store(bank[v], floats.load(task.total, row, start + v * floats.lanes) * shrink, 0)
        with T.serial(tokens) as token:
            at = token * dim + start
            if kind:
                _fetch(task, place, ahead, kind, (at, floats.lanes * spec.value_vectors))
            source = (pages, layer, page, kind, head)
            values = [T.bind(floats.load(*source, at + v * floats.lanes)) for v in vectors]
            for row, bank in zip(rows, sums, strict=True):
                weight = floats.spread(T.bind(task.weight[row, token]))
                for v in vectors:
                    floats.store(bank[v], floats.fma(weight, values[v], floats.load(bank[v], 0)), 0)
        for row, bank in zip(rows, sums, strict=True):
            for v in vectors:
                floats.store(task.total, floats.load(bank[v], 0), row, start + v * floats.lanes)


def _denominator(task: _Task, vector: Expr) -> Expr:
    narrow = task.spec.scores
    sums = registers(1, PAGE)[0]
    for part in range(0, PAGE, narrow.lanes):
        narrow.store(sums, narrow.load(task.denominator, vector, part), part)
    page_floats = Floats(task.spec.isa, PAGE)
    return page_floats.fold(page_floats.load(sums, 0), lambda a, b: a + b)


def _keep(task: _Task, call: Call, line: Expr, part: tuple[Expr, Expr]) -> None:
    """Emits stores of a task's sums, maxima and denominators over some pages of a sequence to scratch
    buffers, which `join` combines. line: index of the first row's record; part: (number of rows, KV head)."""
    (count, head), heads, wide = part, task.spec.heads, task.spec.values
    with T.serial(count * heads.group) as vector:
        row, column = vector // heads.group, head * heads.group + vector % heads.group
        at = T.bind(T.Cast("int64", line + row) * heads.query + column)
        T.buffer_store(call.denominator, _denominator(task, vector), [at])
        T.buffer_store(call.highest, task.highest[vector], [at])
        with T.serial(heads.value_dim // wide.lanes) as k:
            wide.store(call.total, wide.load(task.total, vector, k * wide.lanes), at, k * wide.lanes)


def _finish(task: _Task, call: Call, block: tuple[Expr, Expr, Expr]) -> None:
    """Emits the end of attention for some rows: adds sinks, if any, to the softmax denominators, divides sums
    of values by them and stores the results in call.out. block: (first row, number of rows, KV head)."""
    spec, wide, heads, (first, count, head) = task.spec, task.spec.values, task.spec.heads, block
    with T.serial(count * heads.group) as vector:
        total = _denominator(task, vector)
        if call.sinks is not None:
            sink = Floats(spec.isa, 1).load(call.sinks, head * heads.group + vector % heads.group)
            total = total + wide.scalar.exp(sink - task.highest[vector])
        share = T.bind(T.float32(1.0) / total)
        column = T.bind((head * heads.group + vector % heads.group) * heads.value_dim)
        with T.serial(heads.value_dim // wide.lanes) as k:
            value = wide.load(task.total, vector, k * wide.lanes) * wide.spread(share)
            wide.store(call.out, value, first + vector // heads.group, column + k * wide.lanes)
