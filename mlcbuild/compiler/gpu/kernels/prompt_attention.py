"""Emits the GPU kernel of attention for prompts, on tiles of queries and keys in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.page_layout import InputPlaces
from mlcbuild.compiler.gpu.kernels.paged_attention import AttentionSpec
from mlcbuild.compiler.gpu.kernels.storage import Vector
from mlcbuild.compiler.gpu.tensorir import (
    LOWEST,
    KernelBuilder,
    Value,
    barrier,
    bind,
    either,
    kernel,
    local,
    number,
    put,
    when,
)

QUERIES, KEYS = 32, 32
"""Number of query rows, and number of keys, in a tile of a prompt's attention."""
_TILE_THREADS = 128
_OWN = KEYS // 4
"""Number of the 32 keys of a tile that one thread handles: a quarter, because four threads share a query row.
Of every 32 dimensions of attention's result, a thread computes as many."""
_STRIDE = KEYS + 1
"""Number of columns of a tile in shared memory. It is odd, so that the numbers of a column lie in different
banks.
"""


def attend_prompt(name: str, spec: AttentionSpec, inputs: InputPlaces) -> KernelBuilder:
    """Returns the attention kernel for prompts, which reads rotated queries, `query` [n, heads * head_dim],
    and the paged KV cache, and writes y [n, heads * value_dim]. A workgroup computes up to 32 rows of one
    sequence and one query head, over tiles of 32 keys in shared memory."""
    cache, dim = spec.cache, spec.cache.head_dim
    with kernel(name) as k:
        n = k.size("n")
        query, block = k.buffer("query", (n, cache.heads * dim)), inputs.declare(k)
        pages, y = cache.declare(k), k.buffer("y", (n, cache.heads * cache.value_dim))
        sinks = spec.sinks(k)
        window, _ = k.scalar("window"), k.scalar("t")
        with k.launch(_TILE_THREADS, cache.heads, "t") as (head, index, tx):
            first, count = bind(block[inputs.tiles + 2 * index]), bind(block[inputs.tiles + 2 * index + 1])
            start = bind(block[inputs.positions + first])
            page = bind(inputs.page_table + block[inputs.first_page + first])
            keys = _Keys(spec, (block, page), pages, bind(head // spec.group), bind(start + count - 1))
            tile = _QueryTile.allocate(k, spec, tx, (first, count))
            tile.begin()
            position = bind(block[inputs.positions + tile.row])
            slope = spec.slope(head)
            begin = bind(T.max(start + 1 - window, 0) // KEYS)
            with T.serial((start + count + KEYS - 1) // KEYS - begin) as step:
                base = bind((begin + step) * KEYS)
                tile.score(lambda row, column: query[row, head * dim + column], keys, base)
                factor = tile.soften(base, (position, window), slope)
                tile.add_values(keys, base, factor)
            tile.store(y, head, sinks)
    return k


@dataclass(frozen=True)
class _Keys:
    """Emits loads of the keys and values of one KV head of one sequence from the paged KV cache; each returns
    one float32 element.
    """

    spec: AttentionSpec
    table: tuple[Value, Value]
    """The start of the sequence's page table entries: (int32 buffer of the call's inputs, index of the first
    entry in it).
    """
    pages: Value
    kv_head: Value
    last: Value
    """Position, in its sequence, of the last of the rows that the workgroup computes; no later token is read.
    """

    def number(self, which: int, token: Value, column: Value) -> Value:
        """Returns, as float32, an element of a token's key (`which` is 0) or value (`which` is 1) from the KV
        cache. A token after `last` is replaced by that one.
        """
        cache, token = self.spec.cache, bind(T.min(token, self.last))
        block, first = self.table
        page = bind(block[first + token // PAGE])
        start = cache.place(which, self.kv_head, token % PAGE)
        return bind(cache.number(self.pages, page, start, column))


@dataclass(frozen=True)
class _QueryTile:
    """Emits attention of the rows of a prompt that one workgroup computes for one query head, from scores to
    the result, which is stored in a row of the buffer `y` each. Four threads share a row: each computes the
    scores of every fourth key of a tile, and every fourth dimension of the result.
    """

    spec: AttentionSpec
    tx: Value
    place: tuple[Value, Value]
    """The prompt rows that the workgroup computes: (index of the first among all rows of the call, number of
    rows, at most 32)."""
    left: Value
    right: Value
    weights: Value
    """Flat array in shared memory that holds the attention weights of a tile: element row * 33 + key."""
    reduced: Value
    thread_scores: Value
    sums: Value
    state: Value
    """Two numbers in registers for the query row that the thread computes, over all keys so far, the same in
    all four threads of the row: the maximum of its attention scores, and the sum of its attention weights."""

    @classmethod
    def allocate(
        cls, k: KernelBuilder, spec: AttentionSpec, tx: Value, place: tuple[Value, Value]
    ) -> _QueryTile:
        left, right, weights = (k.shared(QUERIES * _STRIDE) for _ in range(3))
        parts = -(-spec.cache.value_dim // KEYS)
        arrays = local(_OWN), local(parts * _OWN), local(2)
        return cls(spec, tx, place, left, right, weights, k.shared(_TILE_THREADS), *arrays)

    @property
    def value_parts(self) -> int:
        """Returns the number of blocks of 32 dimensions that cover a value vector, rounded up."""
        return -(-self.spec.cache.value_dim // KEYS)

    @property
    def line(self) -> Value:
        return self.tx // 4

    @property
    def row(self) -> Value:
        first, count = self.place
        return bind(first + T.min(self.line, count - 1))

    def begin(self) -> None:
        put(self.state, number(LOWEST), 0)
        put(self.state, number(0), 1)
        with T.serial(self.value_parts * _OWN) as index:
            put(self.sums, number(0), index)

    def _fill(self, tile: Value, part: Value, value: Callable[[Value, Value], Value]) -> None:
        """Emits code that fills the shared array `tile` [32, 33], whose last column is padding, with
        value(row of the tile, dimension of the head), and with 0 beyond the head's dimensions. part: index of
        the block of 32 dimensions. It emits no barrier."""
        dim = self.spec.cache.head_dim
        with T.serial(KEYS * KEYS // _TILE_THREADS) as index:
            flat = bind(index * _TILE_THREADS + self.tx)
            other, column = bind(flat // KEYS), bind(part * KEYS + flat % KEYS)
            inside = bind(column < dim)
            element = value(other, bind(T.min(column, dim - 1)))
            put(tile, T.Select(inside, element, number(0)), other * _STRIDE + flat % KEYS)

    def score(self, query: Callable[[Value, Value], Value], keys: _Keys, base: Value) -> None:
        """Emits the dot products, not yet scaled or masked, of a thread's query row with eight of the 32 keys
        of a tile: of the four threads that share the row, thread i computes the keys i, i + 4, i + 8 and so
        on. They are stored in the registers thread_scores. query: function of (row in the call, dimension of
        the head) that returns an element of a query; base: position of the tile's first key in its sequence.
        """
        first, count = self.place
        for index in range(_OWN):
            put(self.thread_scores, number(0), index)
        with T.serial(-(-self.spec.cache.head_dim // KEYS)) as part:
            self._fill(self.left, part, lambda row, column: query(first + T.min(row, count - 1), column))
            self._fill(self.right, part, lambda key, column: keys.number(0, base + key, column))
            barrier()
            with T.serial(KEYS) as column:
                value = bind(self.left[self.line * _STRIDE + column])
                for index in range(_OWN):
                    key = self.right[(self.tx % 4 + 4 * index) * _STRIDE + column]
                    put(self.thread_scores, value * key + self.thread_scores[index], index)
            barrier()

    def soften(self, base: Value, at: tuple[Value, Value], slope: Value | None) -> Value:
        """Emits a step of online softmax: code that scales the dot products in thread_scores, turns them into
        weights exp(score - maximum) in the shared array `weights`, 0 for tokens after the row's own or before
        its window, and brings `state` up to date. Returns the factor by which the weighted sums of values so
        far must be multiplied. base: position of the tile's first key; at: (position of the row in its
        sequence, window in tokens); slope: of ALiBi, or None."""
        visible, (position, window) = [], at
        for index in range(_OWN):
            token = bind(base + self.tx % 4 + 4 * index)
            visible.append(bind(T.And(token <= position, token > position - window)))
            score = bind(self.spec.score(self.thread_scores[index], slope, token, position))
            put(self.thread_scores, either(visible[-1], score, number(LOWEST)), index)
        largest = self.thread_scores[0]
        for index in range(1, _OWN):
            largest = T.max(largest, self.thread_scores[index])
        largest = self._of_row(largest, self.state[0], T.max)
        factor, total = bind(T.exp(self.state[0] - largest)), number(0)
        for index in range(_OWN):
            weight = bind(either(visible[index], T.exp(self.thread_scores[index] - largest), number(0)))
            put(self.weights, weight, self.line * _STRIDE + self.tx % 4 + 4 * index)
            total = total + weight
        total = self._of_row(total, number(0), lambda left, right: left + right)
        put(self.state, largest, 0)
        put(self.state, self.state[1] * factor + total, 1)
        return factor

    def _of_row(self, value: Value, start: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Emits code that combines `start` and the values of the four threads that share one query row, and
        returns the result, which all four have. value: the running thread's number; combine: function that
        emits the operation on two numbers, such as addition."""
        put(self.reduced, value, self.tx)
        barrier()
        for index in range(4):
            start = combine(start, self.reduced[self.line * 4 + index])
        start = bind(start)
        barrier()
        return start

    def add_values(self, keys: _Keys, base: Value, factor: Value) -> None:
        with T.serial(self.value_parts) as part:
            self._fill(self.right, part, lambda key, column: keys.number(1, base + key, column))
            barrier()
            for index in range(_OWN):
                put(self.sums, self.sums[part * _OWN + index] * factor, part * _OWN + index)
            with T.serial(KEYS) as other:
                weight = bind(self.weights[self.line * _STRIDE + other])
                # Memory of a slot that was never written may hold NaN.
                with when(weight > number(0)):
                    for index in range(_OWN):
                        value = self.right[other * _STRIDE + self.tx % 4 + 4 * index]
                        put(self.sums, weight * value + self.sums[part * _OWN + index], part * _OWN + index)
            barrier()

    def store(self, y: Value, head: Value, sinks: Vector | None) -> None:
        """Emits code that divides a row's weighted sums of values by the sum of its weights, and stores the
        results, the attention output, in y [n, heads * value_dim]. sinks: for each head one more score,
        without a value, that enters the sum of weights, or None."""
        dim, row, factor, total = self.spec.cache.value_dim, self.row, number(1), self.state[1]
        if sinks is not None:
            sink = bind(sinks[head])
            largest = bind(T.max(self.state[0], sink))
            factor = bind(T.exp(self.state[0] - largest))
            total = bind(self.state[1] * factor + T.exp(sink - largest))
        with when(self.line < self.place[1]), T.serial(self.value_parts) as part:
            for index in range(_OWN):
                column = bind(part * KEYS + self.tx % 4 + 4 * index)
                with when(column < dim):
                    value = self.sums[part * _OWN + index]
                    value = value if sinks is None else value * factor
                    put(y, value / total, row, head * dim + column)
