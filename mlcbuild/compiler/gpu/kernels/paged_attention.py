"""Emits GPU kernels of attention over the paged KV cache for decoding: one workgroup for each row (a token of
the batch), group of heads and split of the keys.

Softmax is computed online over tiles of keys (Dao et al., FlashAttention, 2022); splits of a long sequence
are combined by their maxima and sums (Flash-Decoding, 2023). Tiles begin at multiples of their size, and
splits depend only on a row's length, so that a row's bits do not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.activations import capped
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec, InputPlaces
from mlcbuild.compiler.gpu.kernels.storage import Vector
from mlcbuild.compiler.gpu.reductions import reduced
from mlcbuild.compiler.gpu.tensorir import (
    LOWEST,
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    either,
    exact,
    floating,
    kernel,
    local,
    number,
    put,
    strided,
    when,
)
from mlcbuild.models.alibi import slopes
from mlcbuild.models.layers import Alibi

NO_WINDOW = 1 << 30
"""Window size in tokens that means no window: the layer attends to every token."""
_QUERY_FLOATS = 2048
"""Maximum number of float32 values of query heads that one workgroup of decoding attention holds in shared
memory (8 KB).
"""


@dataclass(frozen=True)
class AttentionSpec:
    cache: CacheSpec
    scale: float
    cap: float | None
    splits: int
    """Number of workgroups of a GPU among which decoding attention divides the keys that one row (a token of
    the batch) attends to, for each group of query heads. A second kernel combines their partial results."""
    alibi: Alibi | None = None
    half_sinks: bool | None = None
    """True if the model's attention sinks are stored as float16, False if as float32; None: it has none."""

    @property
    def group(self) -> int:
        """Returns the number of query heads that share one key and value head."""
        return self.cache.heads // self.cache.kv_heads

    @property
    def heads_at_once(self) -> int:
        """Returns the maximum number of query heads, all with the same KV head, that one workgroup computes
        in decoding, 1 to 16."""
        return max(1, min(self.group, _QUERY_FLOATS // self.cache.head_dim, 16))

    @property
    def part_columns(self) -> int:
        """Returns the number of float32 columns in a row, that of one token of the batch, of attention's
        partial results. Several workgroups divide the keys that the token attends to; for each head and
        workgroup, the row holds a weighted sum of values [value_dim], the maximum of the scores and the sum
        of the weights."""
        return self.cache.heads * self.splits * (self.cache.value_dim + 2)

    def slope(self, head: Value) -> Value | None:
        """Returns the ALiBi slope of a query head, an expression; None if attention has no biases. head:
        index of the head, an expression."""
        if self.alibi is None:
            return None
        values = slopes(self.cache.heads, self.alibi)
        chosen = exact(values[-1])
        for place in reversed(range(len(values) - 1)):
            chosen = either(head == place, exact(values[place]), chosen)
        return bind(chosen)

    def score(self, product: Value, slope: Value | None, key: Value, position: Value) -> Value:
        """Returns the attention score for `product`, the dot product of a query and a key: scaled, capped and
        biased as the model defines. slope: the head's ALiBi slope or None; key, position: positions of key
        and query.
        """
        if self.alibi == "bfloat16":
            product = product + _bfloat16(slope * _bfloat16(floating(key)))
        scaled = product * exact(self.scale)
        scaled = scaled if self.cap is None else capped(scaled, self.cap)
        return scaled + slope * floating(key - position) if self.alibi == "exact" else scaled

    def sinks(self, k: KernelBuilder) -> Vector | None:
        """Declares the kernel's buffer of attention sinks, one number for each query head, and returns it;
        None if the model has none."""
        if self.half_sinks is None:
            return None
        return Vector.declare(k, "sinks", self.cache.heads, self.half_sinks)


def _bfloat16(value: Value) -> Value:
    """Returns an expression of a float32 number rounded to bfloat16, ties to even, again as float32."""
    bits = bind(T.reinterpret("uint32", bind(value)))
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
    rounded = bits + T.uint32(0x7FFF) + odd
    return bind(T.reinterpret("float32", bind(T.bitwise_and(rounded, T.uint32(0xFFFF0000)))))


def attend(name: str, spec: AttentionSpec, inputs: InputPlaces) -> KernelBuilder:
    """Returns the attention kernel for decoding, in which several workgroups divide the tokens of a sequence.
    For each row (a token of the batch), head and workgroup it writes a partial result to `part` float32 [n,
    part_columns]: the weighted sum of values, the maximum of the scores and the sum of the weights."""
    cache, at_once = spec.cache, spec.heads_at_once
    chunks = -(-spec.group // at_once)
    with kernel(name) as k:
        n = k.size("n")
        block, pages = inputs.declare(k), cache.declare(k)
        query = k.buffer("query", (n, cache.heads * cache.head_dim))
        part = k.buffer("part", (n, spec.part_columns))
        window = k.scalar("window")
        with k.launch(WORKGROUP, cache.kv_heads * chunks * spec.splits, "n") as (bx, row, tx):
            split, chunk = bind(bx % spec.splits), bind(bx // spec.splits % chunks)
            kv_head = bind(bx // (spec.splits * chunks))
            length = bind(block[inputs.positions + row] + 1)
            first_page = bind(inputs.page_table + block[inputs.first_page + row])
            first_head = chunk * at_once
            heads = [
                bind(kv_head * spec.group + T.min(first_head + g, spec.group - 1)) for g in range(at_once)
            ]
            group = _HeadGroup.allocate(k, spec, tx, kv_head)
            group.begin(lambda g, column: query[row, heads[g] * cache.head_dim + column])
            biases = [spec.slope(head) for head in heads]
            begin = bind(T.max(length - window, 0))
            first_tile, last_tile = begin // WORKGROUP, (length + WORKGROUP - 1) // WORKGROUP
            tiles = bind((last_tile - first_tile + spec.splits - 1) // spec.splits)
            start = bind(first_tile + split * tiles)
            with T.serial(tiles) as tile:
                token = bind((start + tile) * WORKGROUP + tx)
                visible = bind(T.And(token >= begin, token < length))
                put(group.places, block[first_page + T.min(token, length - 1) // PAGE], tx)
                group.score(pages, (token, length - 1), visible, biases)
                for g in range(at_once):
                    group.soften(g, visible)
                barrier()
                group.add_values(pages)
                barrier()
            for g in range(at_once):
                with when(first_head + g < spec.group):
                    group.store(part, row, (heads[g] * spec.splits + split) * (cache.value_dim + 2), g)
    return k


@dataclass(frozen=True)
class _HeadGroup:
    """Emits decoding attention of the query heads of one workgroup, which share a KV head, and holds the
    arrays of their queries, scores and partial sums.
    """

    k: KernelBuilder
    spec: AttentionSpec
    tx: Value
    kv_head: Value
    query: Value
    scores: Value
    """Array in shared memory with the attention weights of a tile of keys, exp(score - maximum), [query head,
    key].
    """
    reduced: Value
    places: Value
    """Array in shared memory: for each token of a tile, the index of its KV cache page."""
    thread_scores: Value
    """Attention scores of the token for which this thread is responsible, one for each query head that the
    workgroup computes.
    """
    sums: Value
    """Array in registers with the weighted sums of the value vectors of attention so far. For each query head
    that the workgroup computes, a thread holds every 64th dimension of the sum."""
    state: Value
    """Array in registers, two numbers for each query head that the workgroup computes: the maximum of the
    attention scores so far, and the sum of the weights exp(score - maximum).
    """

    @classmethod
    def allocate(cls, k: KernelBuilder, spec: AttentionSpec, tx: Value, kv_head: Value) -> _HeadGroup:
        count, parts = spec.heads_at_once, -(-spec.cache.value_dim // WORKGROUP)
        return cls(
            k=k,
            spec=spec,
            tx=tx,
            kv_head=kv_head,
            query=k.shared(count * spec.cache.head_dim),
            scores=k.shared(count * WORKGROUP),
            reduced=k.shared(WORKGROUP),
            places=k.shared(WORKGROUP, "int32"),
            thread_scores=local(count),
            sums=local(count * parts),
            state=local(2 * count),
        )

    @property
    def count(self) -> int:
        return self.spec.heads_at_once

    @property
    def parts(self) -> int:
        return -(-self.spec.cache.value_dim // WORKGROUP)

    def begin(self, value: Callable[[int, Value], Value]) -> None:
        """Emits code that loads the queries into shared memory, and sets the weighted sums of values, the
        maxima of scores and the sums of weights to their initial values. value: function of (number of a head
        among those of the workgroup, dimension) that returns an element of its query.
        """
        dim = self.spec.cache.head_dim
        for g in range(self.count):

            def load(column: Value, g: int = g) -> None:
                put(self.query, value(g, column), g * dim + column)

            strided(dim, self.tx, WORKGROUP, load)
            put(self.state, number(LOWEST), 2 * g)
            put(self.state, number(0), 2 * g + 1)
        for index in range(self.count * self.parts):
            put(self.sums, number(0), index)
        barrier()

    def score(
        self, pages: Value, at: tuple[Value, Value], visible: Value, slopes: Sequence[Value | None]
    ) -> None:
        """Emits the attention scores of a tile of keys for every query head that the workgroup computes; each
        thread computes those of one token, in its registers thread_scores. at: (position of this token,
        position of the query); visible: condition that the query sees the token, which otherwise gets the
        lowest number as its score; slopes: ALiBi slope of each head, or None."""
        cache, (token, position) = self.spec.cache, at
        for g in range(self.count):
            put(self.thread_scores, number(0), g)
        with when(visible):
            page, key = bind(self.places[self.tx]), cache.place(0, self.kv_head, token % PAGE)
            with T.serial(cache.words) as word:
                values = cache.pair(pages, page, key + word)
                for g in range(self.count):
                    total = self.thread_scores[g]
                    for index, value in enumerate(values):
                        column = g * cache.head_dim + word * len(values) + index
                        total = self.query[column] * value + total
                    put(self.thread_scores, total, g)
        for g in range(self.count):
            score = bind(self.spec.score(self.thread_scores[g], slopes[g], token, position))
            put(self.thread_scores, either(visible, score, number(LOWEST)), g)

    def soften(self, g: int, visible: Value) -> None:
        """Emits code that computes the weights exp(score - maximum) of head `g` of the workgroup for a tile
        of keys into `scores`, brings the maximum and the sum of weights up to date, and rescales the weighted
        sums of values so far. visible: condition that the query sees the thread's token, which otherwise has
        the weight 0."""
        at = (self.tx, WORKGROUP)
        (tile_largest,) = reduced(self.k, [self.thread_scores[g]], [self.reduced], at, "max")
        largest = bind(T.max(self.state[2 * g], tile_largest))
        factor = bind(T.exp(self.state[2 * g] - largest))
        weight = bind(either(visible, T.exp(self.thread_scores[g] - largest), number(0)))
        put(self.scores, weight, g * WORKGROUP + self.tx)
        barrier()
        (total,) = reduced(self.k, [weight], [self.reduced], at, "add")
        put(self.state, largest, 2 * g)
        put(self.state, self.state[2 * g + 1] * factor + total, 2 * g + 1)
        for index in range(g * self.parts, (g + 1) * self.parts):
            put(self.sums, self.sums[index] * factor, index)
        barrier()

    def add_values(self, pages: Value) -> None:
        """Emits the addition of the values of a tile of tokens, times their attention weights, to the
        weighted sums in registers.
        """
        cache = self.spec.cache
        with T.serial(WORKGROUP) as token:
            page, start = bind(self.places[token]), cache.place(1, self.kv_head, token % PAGE)
            for index in range(self.parts):
                column = bind(index * WORKGROUP + self.tx)
                with when(column < cache.value_dim):
                    value = bind(cache.number(pages, page, start, column))
                    for g in range(self.count):
                        weight, place = bind(self.scores[g * WORKGROUP + token]), g * self.parts + index
                        # Memory of a slot that was never written may hold NaN.
                        with when(weight > number(0)):
                            put(self.sums, weight * value + self.sums[place], place)

    def store(self, part: Value, row: Value, base: Value, g: int) -> None:
        """Emits code that stores the partial result of query head `g` in the buffer `part`, float32, in row
        `row` from column `base` on: the weighted sums of values [value_dim], the maximum of the scores, and
        the sum of the weights."""
        dim = self.spec.cache.value_dim
        for index in range(self.parts):
            column = index * WORKGROUP + self.tx
            with when(column < dim):
                put(part, self.sums[g * self.parts + index], row, base + column)
        with when(self.tx == 0):
            put(part, self.state[2 * g], row, base + dim)
            put(part, self.state[2 * g + 1], row, base + dim + 1)


def combine(name: str, spec: AttentionSpec) -> KernelBuilder:
    """Returns the kernel that combines attention's partial results, which several workgroups have computed
    for parts of a sequence, and writes attention's output y float32 [n, heads * value_dim]. It reads from
    `part`, for each row (one of n tokens), head and part of the sequence, the weighted sum of values, the
    maximum of the scores and the sum of the weights. Attention sinks, if the model has them, count in the sum
    of the weights."""
    heads, dim = spec.cache.heads, spec.cache.value_dim
    with kernel(name) as k:
        n = k.size("n")
        part, y = k.buffer("part", (n, spec.part_columns)), k.buffer("y", (n, heads * dim))
        sinks = spec.sinks(k)
        with k.launch(WORKGROUP, heads, "n") as (head, row, tx):
            base = [bind((head * spec.splits + split) * (dim + 2)) for split in range(spec.splits)]
            largest = number(LOWEST) if sinks is None else bind(sinks[head])
            for start in base:
                largest = bind(T.max(largest, part[row, start + dim]))
            factors = [bind(T.exp(part[row, start + dim] - largest)) for start in base]
            total = number(0) if sinks is None else T.exp(sinks[head] - largest)
            for start, factor in zip(base, factors, strict=True):
                total = factor * part[row, start + dim + 1] + total
            total = bind(total)

            def store(column: Value) -> None:
                value = number(0)
                for start, factor in zip(base, factors, strict=True):
                    value = factor * part[row, start + column] + value
                put(y, value / total, row, head * dim + column)

            strided(dim, tx, WORKGROUP, store)
    return k
