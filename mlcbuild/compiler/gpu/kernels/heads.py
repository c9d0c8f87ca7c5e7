"""Emits the GPU kernel between the qkv product and attention: it normalizes, clips and rotates heads, and
writes keys and values to the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec, NormVectors, row_statistics
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec, InputPlaces
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    barrier,
    bind,
    exact,
    floating,
    kernel,
    number,
    put,
    strided,
    when,
)
from mlcbuild.models.layers import HeadNorm, QueryScale


@dataclass(frozen=True)
class HeadsSpec:
    """The operations that a GPU kernel applies to the queries and keys of a layer after the qkv product and
    before attention: norms, clipping, rotary embedding, and a scale of queries by position. Values are only
    clipped.
    """

    rope_dim: int = 0
    """Number of leading dimensions of a head that are rotated; 0: no rotation."""
    rows: int = 0
    """Number of positions in the table of cosines and sines of a rotary embedding."""
    norm: NormSpec | None = None
    """The norm of queries and of keys, over each head or, if `span` is "heads", over all query or key heads
    of a token together; None: they are not normalized."""
    span: HeadNorm = "head"
    norm_last: bool = False
    """True if queries and keys are normalized after the rotation, False if before it."""
    clip: float | None = None
    query_scale: QueryScale | None = None

    @property
    def clips_norms(self) -> bool:
        """Returns True if queries and keys are clipped after they are normalized, False if they are clipped
        before or not at all."""
        return self.clip is not None and self.norm is not None and not self.norm_last


Part = Literal["all", "queries", "cached"]
"""The heads that one launch of the kernel `prepare_heads` normalizes, clips and rotates: "all", only
"queries", or only keys and values, which are "cached".
"""


def launch_parts(spec: HeadsSpec) -> tuple[Part, ...]:
    """Returns the heads that each launch of the kernel `prepare_heads` computes: ("all",), or ("queries",
    "cached"), where the second launch computes keys and values, if norms with biases need more buffers than
    one launch may bind.
    """
    return ("queries", "cached") if spec.norm is not None and spec.norm.has_bias else ("all",)


def prepare_heads(
    name: str, cache: CacheSpec, spec: HeadsSpec, inputs: InputPlaces, part: Part
) -> KernelBuilder:
    """Returns the kernel that normalizes, clips and rotates queries and keys, clips values, and scales
    queries by position, each if `spec` says so. It writes queries to `query` [n, heads * head_dim], and keys
    and values to the KV cache. One workgroup computes one head of one row. part: "all" of these heads, only
    "queries", or only keys and values ("cached")."""
    dim = cache.head_dim
    first, end = _range(cache, part)
    with kernel(name) as k:
        n = k.size("n")
        qkv, block = k.buffer("qkv", (n, cache.width)), inputs.declare(k)
        query = k.buffer("query", (n, cache.heads * dim)) if first < cache.heads else None
        pages = None if part == "queries" else cache.declare(k)
        table = k.buffer("table", (spec.rows, spec.rope_dim)) if spec.rope_dim else None
        norms = None if spec.norm is None else _declare_norms(k, cache, spec, part)
        with k.launch(WORKGROUP, end - first, "n") as (bx, row, tx):
            place = bind(bx + first)
            head = _Head(k, cache, spec, qkv, (place, row, tx))
            position = bind(block[inputs.positions + row])
            vector, result = k.shared(dim), k.shared(dim)
            strided(dim, tx, WORKGROUP, lambda column: put(vector, head.read(place * dim + column), column))
            barrier()
            if norms is not None and not spec.norm_last:
                head.normalize(vector, norms)
            if table is None:
                result = vector
            else:
                strided(dim, tx, WORKGROUP, lambda at: head.rotate(vector, result, at, (table, position)))
                barrier()
            if norms is not None and spec.norm_last:
                head.normalize(result, norms)
            scale = _scale_at(spec.query_scale, position)
            if query is not None:
                with when(head.is_query):
                    head.store(query, result, scale)
            if pages is not None:
                slot = bind(block[inputs.slots + row])
                with when(T.Not(head.is_query)):
                    index = place - cache.heads
                    at = (index // cache.kv_heads, index % cache.kv_heads, slot)
                    cache.append(pages, result, at, tx)
    return k


def _range(cache: CacheSpec, part: Part) -> tuple[int, int]:
    """Returns (first head, head after the last) of the heads that a launch computes. part: "all", "queries",
    or "cached" for keys and values; heads are numbered in the order queries, keys, values.
    """
    first = cache.heads if part == "cached" else 0
    return first, cache.heads if part == "queries" else cache.heads + 2 * cache.kv_heads


def _declare_norms(
    k: KernelBuilder, cache: CacheSpec, spec: HeadsSpec, part: Part
) -> tuple[NormVectors, NormVectors]:
    """Declares the kernel's buffers for the weights and biases of the norm of queries and of the norm of
    keys, and returns both. If the launch computes only queries, or only keys and values, the one norm is
    returned twice.
    """
    assert spec.norm is not None
    queries, keys = (1, 1) if spec.span == "head" else (cache.heads, cache.kv_heads)
    norms = []
    if part != "cached":
        norms.append(NormVectors.declare(k, spec.norm, ("q_weight", "q_shift"), queries * cache.head_dim))
    if part != "queries":
        norms.append(NormVectors.declare(k, spec.norm, ("k_weight", "k_shift"), keys * cache.head_dim))
    return norms[0], norms[-1]


def _scale_at(scale: QueryScale | None, position: Value) -> Value | None:
    """Returns the factor by which a query at the token position `position` is multiplied, the expression 1 +
    beta * ln(1 + position // length); None if queries are not scaled.
    """
    if scale is None:
        return None
    return bind(number(1) + exact(scale.beta) * T.log(number(1) + floating(position // scale.length)))


class _Head:
    """Emits norm, clipping and rotation of one head of one row, a query, key or value, by one workgroup."""

    def __init__(
        self, k: KernelBuilder, cache: CacheSpec, spec: HeadsSpec, qkv: Value, at: tuple[Value, Value, Value]
    ) -> None:
        """Initializes the object that emits code for one head of one row of the buffer `qkv` [rows, values of
        all heads]. at: (number of the head, where query heads come first, then key heads, then value heads;
        index of the row; index of the thread in the workgroup)."""
        self._k, self._cache, self._spec, self._qkv = k, cache, spec, qkv
        self._place, self._row, self._tx = at
        self.is_query = self._place < cache.heads
        self._is_value = self._place >= cache.heads + cache.kv_heads

    def read(self, column: Value) -> Value:
        """Returns an expression for the value in the column `column` of the row that holds a token's queries,
        keys and values. The value is clipped if the model clips queries, keys and values, unless it does so
        only after a norm."""
        value = self._qkv[self._row, column]
        return bind(value if self._spec.clips_norms else self._clipped(value))

    def _clipped(self, value: Value) -> Value:
        """Returns a value limited to -clip .. clip; unchanged if the model does not clip."""
        clip = self._spec.clip
        return value if clip is None else T.max(T.min(value, exact(clip)), exact(-clip))

    def store(self, query: Value, vector: Value, scale: Value | None) -> None:
        """Emits the store of a query head in a row of the buffer `query`, times `scale` if that is not None.
        vector: array of its float32 elements in shared memory.
        """
        dim = self._cache.head_dim

        def store(column: Value) -> None:
            value = vector[column] if scale is None else vector[column] * scale
            put(query, value, self._row, self._place * dim + column)

        strided(dim, self._tx, WORKGROUP, store)

    def normalize(self, vector: Value, norms: tuple[NormVectors, NormVectors]) -> None:
        """Emits the norm of a query or key head in shared memory, in place, and clips the head if the model
        does so after norms; a value head is only clipped. norms: (norm of queries, norm of keys).
        """
        cache, dim = self._cache, self._cache.head_dim
        mean, root = self._statistics(vector)
        queries, keys = T.int32(0), T.int32(0)
        if self._spec.span != "head":
            queries = bind(T.min(self._place, cache.heads - 1) * dim)
            keys = bind(T.min(T.max(self._place - cache.heads, 0), cache.kv_heads - 1) * dim)
        first_element = bind(T.Select(self.is_query, queries, keys))

        def normalize(column: Value) -> None:
            value = bind(vector[column])
            normed = bind((value if mean is None else value - mean) * root)
            if norms[0] is norms[1]:
                query = key = norms[0].scaled(normed, bind(first_element + column))
            else:
                query = norms[0].scaled(normed, bind(queries + column))
                key = norms[1].scaled(normed, bind(keys + column))
            normalized = T.Select(self._is_value, value, T.Select(self.is_query, query, key))
            put(vector, self._clipped(normalized) if self._spec.clips_norms else normalized, column)

        strided(dim, self._tx, WORKGROUP, normalize)
        barrier()

    def _statistics(self, vector: Value) -> tuple[Value | None, Value]:
        """Emits code that computes the statistics by which a query or key is normalized, over one head or
        over all query or key heads of a token. Returns two expressions: the mean, or None if the norm does
        not subtract it, and 1 / sqrt(mean square + eps), where the mean, if there is one, is subtracted from
        the values before they are squared."""
        norm, cache, dim = self._spec.norm, self._cache, self._cache.head_dim
        assert norm is not None
        if self._spec.span != "heads":
            return row_statistics(self._k, norm, self._tx, lambda column: vector[column])
        count = bind(T.Select(self.is_query, cache.heads * dim, cache.kv_heads * dim))
        first = bind(T.Select(self.is_query, 0, cache.heads * dim))
        return row_statistics(self._k, norm, self._tx, lambda column: self.read(first + column), count)

    def rotate(self, vector: Value, result: Value, column: Value, at: tuple[Value, Value]) -> None:
        """Emits code that writes dimension `column` of a head, after rotary embedding in pairs (i, i +
        rope_dim / 2), from the array `vector` to the array `result`, both in shared memory. Dimensions that
        are not rotated, and all of a value head, are copied. at: (table of cosines and sines, the row's
        position in it).
        """
        (table, position), turned = at, self._spec.rope_dim // 2
        pair = bind(column % turned)
        cosine, sine = bind(table[position, pair]), bind(table[position, turned + pair])
        value, last = bind(vector[column]), self._cache.head_dim - 1
        partner = bind(vector[T.min(T.Select(column < turned, column + turned, column - turned), last)])
        signed = T.Select(column < turned, -partner, partner)
        rotated = bind(value * cosine + signed * sine)
        turns = T.And(column < 2 * turned, T.Not(self._is_value))
        put(result, T.Select(turns, rotated, value), column)
