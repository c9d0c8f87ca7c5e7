"""Causal attention over the paged cache: one kernel for decoding, prefilling, and both in one batch.

The rows of a sequence are cut into blocks; a task is (block, kv head) and handles the block's rows for every
query head of the group, so that a key or value is read once for all of them. Pages are visited once, with the
running maximum and denominator of Milakov and Gimelshein (2018). Nothing depends on the number of sequences,
pages or rows at compile time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.kernels.cache import PAGE, Heads
from mlcbuild.compiler.kernels.floats import Floats, kernel, registers, scratch, size_var
from mlcbuild.compiler.kernels.isa import ISA
from mlcbuild.compiler.kernels.vectors import prefetch

NO_WINDOW = 1 << 30
"""The window argument of a layer that sees everything."""

_HIDDEN, _LOWEST = -2e30, -1e30  # a hidden score is far below the first maximum: e^-87, not NaN

_Place = tuple[Buffer, Expr, Expr, Expr]
"""(pages, layer, page, kv head)."""
_Ahead = tuple[Expr, Expr]
"""(whether to prefetch, page)."""


@dataclass(frozen=True)
class Attention:
    """The shape of the kernel: how many vectors it keeps where."""

    isa: ISA
    heads: Heads
    scale: float
    softcap: float | None

    @property
    def registers(self) -> int:
        """Vector registers of the processor."""
        return 32 if self.isa.lanes == 16 or self.isa.name == "neon" else 16

    @property
    def scores(self) -> Floats:
        return Floats.dividing(self.isa, PAGE)

    @property
    def values(self) -> Floats:
        return Floats.dividing(self.isa, self.heads.dim)

    @property
    def tile(self) -> int:
        """Query vectors handled together: their scores of one page fill at most half the registers."""
        return max(1, min(4, self.registers * self.scores.lanes // (2 * PAGE)))

    @property
    def value_vectors(self) -> int:
        """Vectors of each output row that are kept in registers at a time; divides a row."""
        limit = max(1, self.registers // (2 * self.tile))
        whole = self.heads.dim // self.values.lanes
        return max(count for count in range(1, limit + 1) if whole % count == 0)

    @property
    def block(self) -> int:
        """Rows of one sequence in a task: about 32 query vectors, which stay in the first-level cache."""
        return max(1, 32 // self.heads.group)

    @property
    def capacity(self) -> int:
        """Query vectors a task has room for: whole tiles."""
        return -(-self.block * self.heads.group // self.tile) * self.tile


@dataclass(frozen=True)
class _Task:
    """What the code of one task works on. A vector is one query head of one row."""

    spec: Attention
    query: Buffer  # [capacity, dim], scaled
    total: Buffer  # [capacity, dim], weighted sum of values so far
    weight: Buffer  # [capacity, PAGE], of the page at hand
    denominator: Buffer  # [capacity, PAGE], one partial sum for each lane
    highest: Buffer  # [capacity], maximum so far
    shrink: Buffer  # [capacity], what older sums are multiplied by
    position: Buffer  # int32 [capacity]


def attention(spec: Attention) -> PrimFunc:
    """(qkv float32 [n, width] with rotated queries, pages, q_indptr int32 [b+1], page_indptr int32 [b+1],
    page_table int32 [p], kv_lengths int32 [b], positions int32 [n], layer int64, window int64)
    -> float32 [n, heads * dim].
    """
    heads = spec.heads
    with kernel("paged_attention") as made:
        rows, batch = size_var("n"), size_var("b")
        qkv = made.tensor("qkv", (rows, heads.width))
        pages = made.tensor("pages", heads.cache_shape(size_var("num_pages")), heads.dtype)
        q_indptr = made.tensor("q_indptr", (batch + 1,), "int32")
        page_indptr = made.tensor("page_indptr", (batch + 1,), "int32")
        page_table = made.tensor("page_table", (size_var("p"),), "int32")
        kv_lengths = made.tensor("kv_lengths", (batch,), "int32")
        positions = made.tensor("positions", (rows,), "int32")
        layer, window = made.number("layer"), made.number("window")
        out = made.tensor("out", (rows, heads.query * heads.dim))
        # A sequence has at most rows // block + 1 blocks, so this many are enough for all of them.
        blocks = rows // spec.block + batch
        with made.body(), T.parallel(blocks * heads.kv) as index:
            head = T.bind(index // blocks)
            place = registers(1, 2, "int32")[0]
            _find_block(spec, (q_indptr, batch), _folded(index % blocks, blocks), place)
            with T.If(place[0] >= 0), T.Then():
                sequence, first = T.bind(place[0]), T.bind(place[1])
                count = T.bind(T.min(spec.block, q_indptr[sequence + 1] - first))
                task = _start(spec, (qkv, positions), (first, count, head))
                last = T.bind(T.min(positions[first + count - 1] + 1, kv_lengths[sequence]))
                oldest = T.max(T.Cast("int64", positions[first]) - window + 1, T.int64(0))
                begin = T.bind(T.Cast("int32", oldest) // PAGE)
                with T.serial((last + PAGE - 1) // PAGE - begin) as step:
                    base = T.bind((begin + step) * PAGE)
                    listed = T.bind(page_indptr[sequence] + begin + step)
                    page = T.bind(T.Cast("int64", page_table[listed]))
                    after = T.bind(T.Cast("int64", page_table[T.min(listed + 1, page_indptr[batch] - 1)]))
                    seen = T.bind(T.min(PAGE, last - base))
                    with T.serial(_tiles(spec, count)) as tile:
                        _scores(task, (pages, layer, page, head), tile, (tile == 0, after))
                        _weights(task, tile, base, window)
                        _values(task, (pages, layer, page, head), tile, seen, (tile == 0, after))
                _finish(task, out, (first, count, head))
    return made.func


def _folded(index: Expr, blocks: Expr) -> Expr:
    """0, last, 1, last - 1, ...: late blocks of a sequence see more keys, so any run of indexes that one core
    takes has early and late ones."""
    return T.Select(index % 2 == 0, index // 2, blocks - 1 - index // 2)


def _find_block(spec: Attention, sequences: tuple[Buffer, Expr], wanted: Expr, place: Buffer) -> None:
    """place = (sequence, first row) of the block number `wanted`; sequence -1 if there are fewer blocks."""
    q_indptr, batch = sequences
    left = registers(1, 1, "int32")[0]
    T.buffer_store(left, T.Cast("int32", wanted), [0])
    T.buffer_store(place, T.int32(-1), [0])
    T.buffer_store(place, T.int32(0), [1])
    with T.serial(T.Cast("int32", batch)) as sequence:
        first = T.bind(q_indptr[sequence])
        count = T.bind((q_indptr[sequence + 1] - first + spec.block - 1) // spec.block)
        with T.If(T.And(left[0] >= 0, left[0] < count)), T.Then():
            T.buffer_store(place, sequence, [0])
            T.buffer_store(place, first + left[0] * spec.block, [1])
        T.buffer_store(left, left[0] - count, [0])


def _tiles(spec: Attention, count: Expr) -> Expr:
    return (count * spec.heads.group + spec.tile - 1) // spec.tile


def _start(spec: Attention, given: tuple[Buffer, Buffer], block: tuple[Expr, Expr, Expr]) -> _Task:
    """Room for a task, filled with the scaled queries of its rows. Vectors that pad the last tile repeat the
    last one; nothing of theirs is stored."""
    (qkv, positions), (first, count, head) = given, block
    heads, wide, narrow, room = spec.heads, spec.values, spec.scores, spec.capacity
    task = _Task(
        spec,
        query=scratch((room, heads.dim)),
        total=scratch((room, heads.dim)),
        weight=scratch((room, PAGE)),
        denominator=scratch((room, PAGE)),
        highest=scratch((room,)),
        shrink=scratch((room,)),
        position=scratch((room,), "int32"),
    )
    with T.serial(_tiles(spec, count) * spec.tile) as vector:
        known = T.bind(T.min(vector, count * heads.group - 1))
        row = T.bind(first + known // heads.group)
        column = T.bind((head * heads.group + known % heads.group) * heads.dim)
        with T.serial(heads.dim // wide.lanes) as k:
            value = wide.load(qkv, row, column + k * wide.lanes)
            wide.store(task.query, value * wide.constant(spec.scale), vector, k * wide.lanes)
            wide.store(task.total, wide.constant(0.0), vector, k * wide.lanes)
        for part in range(0, PAGE, narrow.lanes):
            narrow.store(task.denominator, narrow.constant(0.0), vector, part)
        T.buffer_store(task.highest, T.float32(_LOWEST), [vector])
        T.buffer_store(task.position, positions[row], [vector])
    return task


def _fetch(task: _Task, place: _Place, ahead: _Ahead, kind: int, span: tuple[Expr, int]) -> None:
    """Ask for elements [start, start + count) of the page that comes next. Pages lie anywhere, so the
    hardware cannot guess; the first tile asks for all that follow it."""
    pages, layer, _, head = place
    wanted, page = ahead
    start, count = span
    line = 64 // (2 if task.spec.heads.dtype == "float16" else 4)
    with T.If(wanted), T.Then():
        for at in range(0, count, line):
            prefetch(pages, (layer, page, kind, head, start + at))


def _scores(task: _Task, place: _Place, tile: Expr, ahead: _Ahead) -> None:
    """weight[vectors of the tile] = query . key for the 16 tokens of a page."""
    spec, floats = task.spec, task.spec.scores
    pages, layer, page, head = place
    dim, parts = spec.heads.dim, PAGE // floats.lanes
    # At least eight independent sums, to hide the latency of multiply-add.
    split = 2 if parts * spec.tile < 8 and dim % 2 == 0 else 1
    unroll = 4 if dim % 4 == 0 else split
    sums = [[registers(parts, floats.lanes) for _ in range(spec.tile)] for _ in range(split)]
    for total in (total for bank in sums for row in bank for total in row):
        floats.store(total, floats.constant(0.0), 0)
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
            floats.store(task.weight, value, tile * spec.tile + row, part * floats.lanes)


def _weights(task: _Task, tile: Expr, base: Expr, window: Expr) -> None:
    """Scores become exp(score - maximum); the maximum, the denominator and the shrink factor move on."""
    spec, floats = task.spec, task.spec.scores
    with T.serial(spec.tile) as inner:
        row = T.bind(tile * spec.tile + inner)
        scores = [_visible_scores(task, row, (base, part), window) for part in range(0, PAGE, floats.lanes)]
        best = registers(1, floats.lanes)[0]
        floats.store(best, scores[0], 0)
        for score in scores[1:]:
            floats.store(best, T.max(floats.load(best, 0), score), 0)
        highest = T.bind(T.max(task.highest[row], floats.fold(best, T.max)))
        shrink = floats.scalar.exp(task.highest[row] - highest)
        T.buffer_store(task.highest, highest, [row])
        T.buffer_store(task.shrink, shrink, [row])
        for part, score in zip(range(0, PAGE, floats.lanes), scores, strict=True):
            weight = floats.exp(score - floats.spread(highest))
            floats.store(task.weight, weight, row, part)
            older = floats.load(task.denominator, row, part)
            floats.store(task.denominator, floats.fma(older, floats.spread(shrink), weight), row, part)


def _visible_scores(task: _Task, row: Expr, tokens: tuple[Expr, int], window: Expr) -> Expr:
    """Scores of the tokens from base + part on, soft-capped; hidden where the token is later than the query
    or has left its window."""
    spec, floats, (base, part) = task.spec, task.spec.scores, tokens
    score = T.bind(floats.load(task.weight, row, part))
    if spec.softcap is not None:
        score = T.bind(floats.soft_cap(score, spec.softcap))
    newest = T.bind(task.position[row])
    oldest = T.bind(T.Cast("int32", T.max(T.Cast("int64", newest) - window, T.int64(-1))))
    token = T.bind(T.ramp(base + part, 1, floats.lanes) if floats.lanes > 1 else base + part)
    late = T.Select(token <= floats.spread(newest), score, floats.constant(_HIDDEN))
    return T.bind(T.Select(token > floats.spread(oldest), late, floats.constant(_HIDDEN)))


def _values(task: _Task, place: _Place, tile: Expr, seen: Expr, ahead: _Ahead) -> None:
    """total = total * shrink + weight . values, for the `seen` first tokens of a page. Later ones may never
    have been written: even a weight of zero would let a NaN through."""
    spec, floats = task.spec, task.spec.values
    pages, layer, page, head = place
    vectors, dim = range(spec.value_vectors), spec.heads.dim
    rows = [tile * spec.tile + row for row in range(spec.tile)]
    with T.serial(dim // (floats.lanes * spec.value_vectors)) as outer:
        start = T.bind(outer * floats.lanes * spec.value_vectors)
        sums = [registers(spec.value_vectors, floats.lanes) for _ in rows]
        for row, bank in zip(rows, sums, strict=True):
            shrink = floats.spread(T.bind(task.shrink[row]))
            for v in vectors:
                floats.store(bank[v], floats.load(task.total, row, start + v * floats.lanes) * shrink, 0)
        with T.serial(seen) as token:
            at = token * dim + start
            _fetch(task, place, ahead, 1, (at, floats.lanes * spec.value_vectors))
            values = [
                T.bind(floats.load(pages, layer, page, 1, head, at + v * floats.lanes)) for v in vectors
            ]
            for row, bank in zip(rows, sums, strict=True):
                weight = floats.spread(T.bind(task.weight[row, token]))
                for v in vectors:
                    floats.store(bank[v], floats.fma(weight, values[v], floats.load(bank[v], 0)), 0)
        for row, bank in zip(rows, sums, strict=True):
            for v in vectors:
                floats.store(task.total, floats.load(bank[v], 0), row, start + v * floats.lanes)


def _finish(task: _Task, out: Buffer, block: tuple[Expr, Expr, Expr]) -> None:
    """out = total / denominator for the rows of the block."""
    first, count, head = block
    spec, narrow, wide = task.spec, task.spec.scores, task.spec.values
    heads = spec.heads
    with T.serial(count * heads.group) as vector:
        sums = registers(1, PAGE)[0]
        for part in range(0, PAGE, narrow.lanes):
            narrow.store(sums, narrow.load(task.denominator, vector, part), part)
        total = Floats(spec.isa, PAGE).fold(sums, lambda a, b: a + b)
        share = T.bind(T.float32(1.0) / total)
        column = T.bind((head * heads.group + vector % heads.group) * heads.dim)
        with T.serial(heads.dim // wide.lanes) as k:
            value = wide.load(task.total, vector, k * wide.lanes) * wide.spread(share)
            wide.store(out, value, first + vector // heads.group, column + k * wide.lanes)
