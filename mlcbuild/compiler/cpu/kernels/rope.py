"""Emits kernels that rotate queries and keys (rotary position embedding) and write new keys and values into
the KV cache.

Angles: Su et al., RoFormer (2021), in the half-split form that checkpoints of the Llama line use: the pair
(i, i + dim/2) is rotated by position * inv_freq[i].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import int8_cache, vectors
from mlcbuild.compiler.cpu.kernels.floats import Floats, Kernel, kernel, over_rows, size_var
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.norm import Norm, Weights
from mlcbuild.models import QueryScale

SERIAL_TOKENS = 4
"""Maximum number of tokens whose angles, or whose rotation and writes to the KV cache, one core computes
alone, since waking the other cores would take longer; `ci/bench/kernels --threads 2` prints how long waking
takes.
"""


def angles(isa: ISA, dim: int, factor: float, query_scale: QueryScale | None = None) -> PrimFunc:
    """Returns the kernel (positions int32 [n], inv_freq float32 [dim/2], out float32 [n, dim]) that writes
    the cosines of position * inv_freq, then the sines, both times `factor`. With `query_scale`, `out` has one
    more column, the scale of queries at this position: 1 + beta * ln(1 + position // length).

    The angle is computed in float32, as checkpoints' own code does, so long contexts agree with it.
    """
    half, scalar = dim // 2, Floats(isa, 1)
    with kernel("rope_angles") as emitter:
        rows = size_var("n")
        positions = emitter.tensor("positions", (rows,), "int32")
        inv_freq = emitter.tensor("inv_freq", (half,))
        out = emitter.tensor("out", (rows, dim + (query_scale is not None)))

        def one_row(row: Expr) -> None:
            with T.serial(half) as i:
                angle = T.bind(T.Cast("float32", positions[row]) * inv_freq[i])
                scalar.store(out, T.cos(angle) * scalar.constant(factor), row, i)
                scalar.store(out, T.sin(angle) * scalar.constant(factor), row, half + i)
            if query_scale is not None:
                periods = T.Cast("float32", T.truncdiv(positions[row], T.int32(query_scale.length)))
                grown = T.log(periods + scalar.constant(1.0)) * scalar.constant(query_scale.beta)
                scalar.store(out, grown + scalar.constant(1.0), row, dim)

        with emitter.body():
            over_rows(rows, SERIAL_TOKENS, one_row)
    return emitter.func


@dataclass(frozen=True)
class Append:
    """The computations of CPU kernels on a token's query, key and value between the qkv product and
    attention: bias, norms, clipping and rotation.
    """

    isa: ISA
    heads: Heads
    rope_dim: int
    """Number of leading dimensions of a head that are rotated; 0: nothing is rotated."""
    bias: str | None
    """Stored type of the bias of query, key and value; None: there is none."""
    norms: tuple[Norm, Norm] | None
    """The norms of queries and of keys, each over all heads of a token if its size exceeds that of a head,
    else over one head; None: they are not normalized.
    """
    own_weights: bool = False
    """True if each head has its own weights in the norms of queries and keys."""
    norm_last: bool = False
    """True if queries and keys are normalized after the rotation."""
    clip: float | None = None
    query_scale: bool = False
    """True if queries are multiplied by a scale that depends on the position: the last column of the buffer
    of cosines and sines.
    """

    @property
    def clips_norms(self) -> bool:
        """Returns True if queries and keys are clipped after their norms, False if after their biases or not
        at all.
        """
        return self.clip is not None and self.norms is not None and not self.norm_last

    @property
    def joint(self) -> bool:
        """Returns True if one norm spans all query heads of a token together and another all key heads; False
        if each head is normalized alone, or none.
        """
        return self.norms is not None and self.norms[0].size > self.heads.dim


@dataclass(frozen=True)
class _Row:
    """The buffers of one token's query, key and value, and of the biases, norm weights, cosines and sines
    that apply to them.
    """

    qkv: Buffer
    row: Expr
    turns: Buffer | None
    bias: Buffer | None
    weights: tuple[Weights, Weights]
    """(buffers of the query norm's weights and biases, buffers of the key norm's weights and biases); a
    buffer that a norm lacks is None.
    """


def rope_append(spec: Append) -> PrimFunc:
    """Returns the kernel that adds the bias to queries, keys and values, then normalizes, clips and rotates
    queries and keys (or normalizes them last, with norm_last), and clips values, as far as the model has
    these parts. Queries are changed in place in qkv; keys and values are written to the KV cache, and their
    columns of qkv are undefined afterwards.

    Its arguments are: angles float32 [n, rope_dim]? (cosines, then sines; with query_scale one more column,
    the scale of queries), slots int32 [n] (a token's index in the cache: page * 16 + index in the page),
    forks int32 [f, 3], bias [width]?, q_norm weight?, bias?, k_norm weight?, bias?, qkv float32 [n, width] in
    place, pages (the KV cache of all layers) in place, layer int64. A question mark means that the argument
    exists only if the model has it.

    Each fork is (source page, destination page, tokens): after all rows, one fork after the other, the first
    `tokens` keys and values of a page are copied to another one. So each branch of a tree of draft tokens has
    a separate last page, in which a token has the same index as without a tree.
    """
    heads, scalar = spec.heads, Floats(spec.isa, 1)
    with kernel("rope_append") as emitter:
        rows, turns = size_var("n"), None
        if spec.rope_dim:
            turns = emitter.tensor("angles", (rows, spec.rope_dim + spec.query_scale))
        slots = emitter.tensor("slots", (rows,), "int32")
        forks = emitter.tensor("forks", (size_var("f"), 3), "int32")
        bias = emitter.tensor("bias", (heads.width,), spec.bias) if spec.bias else None
        weights = [_weights(emitter, spec, kind) for kind in (0, 1)]
        qkv = emitter.tensor("qkv", (rows, heads.width))
        pages = emitter.tensor("pages", heads.cache_shape(size_var("num_pages")), heads.dtype)
        layer = emitter.number("layer")

        def one_token(row: Expr) -> None:
            token = _Row(qkv, row, turns, bias, (weights[0], weights[1]))
            slot = T.bind(T.Cast("int64", slots[row]))
            page, offset = T.bind(slot // PAGE), T.bind(slot % PAGE)
            if spec.joint:
                _normalize_all(spec, token)
            with T.serial(heads.query) as head:
                _turn(spec, token, 0, (head, head * heads.dim))
            with T.serial(heads.kv) as head:
                at = T.bind((heads.query + head) * heads.dim)
                _turn(spec, token, 1, (head, at))
                if heads.has_scales:
                    int8_cache.write(spec.isa, heads, (qkv, row, at), pages, ((layer, page, 0, head), offset))
                else:
                    with T.serial(heads.dim) as i:
                        scalar.store(pages, qkv[row, at + i], layer, page, 0, head, i * PAGE + offset)
            with T.serial(heads.kv) as head:
                _write_value(spec, (token, pages), head, (layer, page, offset))

        with emitter.body():
            over_rows(rows, SERIAL_TOKENS, one_token)
            with T.serial(forks.shape[0]) as fork:
                source, target, tokens = (T.bind(forks[fork, i]) for i in range(3))
                _fork(spec, pages, (layer, source, target), tokens)
    return emitter.func


def _weights(emitter: Kernel, spec: Append, kind: int) -> Weights:
    """Declares the kernel's arguments for the norm of queries (kind 0) or of keys (kind 1), and returns their
    buffers, (weights, biases), each [size of the norm], or with a norm of its own for each head [heads *
    size]. A buffer that the norm lacks is None.
    """
    if spec.norms is None:
        return None, None
    norm, name = spec.norms[kind], "qk"[kind]
    count = (spec.heads.query, spec.heads.kv)[kind] if spec.own_weights else 1
    return norm.tensors(
        lambda which, dtype: emitter.tensor(f"{name}_norm_{which}", (norm.size * count,), dtype)
    )


def _fork(spec: Append, pages: Buffer, place: tuple[Expr, Expr, Expr], tokens: Expr) -> None:
    """Emits the copy of the first `tokens` keys and values of a page of the KV cache to another page, whose
    other tokens stay unchanged. place: (layer, source page, destination page).
    """
    (layer, source, target), heads = place, spec.heads
    by_token = math.gcd(PAGE, spec.isa.lanes)
    by_value = math.gcd(heads.dim, spec.isa.lanes)
    with T.serial(heads.kv) as head:
        with T.serial(heads.dim) as i, T.serial(PAGE // by_token) as part:
            first = part * by_token
            at = vectors.span(i * PAGE + first, by_token)
            token = vectors.span(T.Cast("int32", first), by_token)
            new, old = (pages[layer, page, 0, head, at] for page in (source, target))
            merged = T.Select(token < vectors.splat(tokens, by_token), new, old)
            T.buffer_store(pages, merged, [layer, target, 0, head, at])
        with T.serial(tokens) as row, T.serial(heads.dim // by_value) as part:
            at = vectors.span(row * heads.dim + part * by_value, by_value)
            T.buffer_store(pages, pages[layer, source, 1, head, at], [layer, target, 1, head, at])
        if heads.has_scales:
            int8_cache.copy_scales(heads, pages, place, head, tokens)


def _normalize_all(spec: Append, token: _Row) -> None:
    """Emits code that adds biases to a token's queries and keys, applies one norm over all query heads and
    one over all key heads, and clips the results; biases and clipping are left out if the model has none.
    """
    assert spec.norms is not None
    for kind, norm in enumerate(spec.norms):
        start = spec.heads.query * spec.heads.dim if kind else 0
        _adjust(spec, token, start, norm.size)
        _normalize(spec, norm, token, start, token.weights[kind])


def _normalize(
    spec: Append, norm: Norm, token: _Row, start: Expr | int, weights: Weights, first: Expr | int = 0
) -> None:
    """Emits code that normalizes `norm.size` values of a token's row in qkv (queries, keys and values) in
    place, from column `start` on, and clips the results if the model clips between norm and rotation.
    weights: buffers of the norm's weights and biases; first: index in these buffers of the first element that
    applies.
    """
    norm_floats = norm.floats
    clip = spec.clip if spec.clips_norms else None
    norm.row(
        lambda at: norm_floats.load(token.qkv, token.row, start + at),
        weights,
        lambda at, value: norm_floats.store(
            token.qkv, _clipped(norm_floats, value, clip), token.row, start + at
        ),
        first,
    )


def _turn(spec: Append, token: _Row, kind: int, place: tuple[Expr, Expr]) -> None:
    """Emits code that adds the bias to one query or key head of a token in qkv, normalizes, clips and rotates
    it, and scales a query by its position, all in place. With norms over all heads, bias, norm and clipping
    must be done before and are left out. kind: 0 for queries, 1 for keys; place: (index of the head among
    those of its kind, its first column in qkv).
    """
    head, start = place
    norm = None if spec.norms is None or spec.joint else spec.norms[kind]
    first = head * spec.heads.dim if spec.own_weights else 0
    if not spec.joint:
        _adjust(spec, token, start, spec.heads.dim)
    if norm is not None and not spec.norm_last:
        _normalize(spec, norm, token, start, token.weights[kind], first)
    if token.turns is not None:
        _rotate(spec, token, token.turns, start)
    if norm is not None and spec.norm_last:
        _normalize(spec, norm, token, start, token.weights[kind], first)
    if spec.query_scale and kind == 0 and token.turns is not None:
        floats = Floats.dividing(spec.isa, spec.heads.dim)
        scale = T.bind(floats.spread(T.bind(token.turns[token.row, spec.rope_dim])))
        with T.serial(spec.heads.dim // floats.lanes) as k:
            at = start + k * floats.lanes
            floats.store(token.qkv, floats.load(token.qkv, token.row, at) * scale, token.row, at)


def _rotate(spec: Append, token: _Row, turns: Buffer, start: Expr) -> None:
    half, qkv, row = spec.rope_dim // 2, token.qkv, token.row
    floats = Floats.dividing(spec.isa, half)
    with T.serial(half // floats.lanes) as k:
        i = k * floats.lanes
        a, b = (T.bind(floats.load(qkv, row, start + shift + i)) for shift in (0, half))
        cos, sin = (T.bind(floats.load(turns, row, shift + i)) for shift in (0, half))
        floats.store(qkv, a * cos - b * sin, row, start + i)
        floats.store(qkv, b * cos + a * sin, row, start + half + i)


def _adjust(spec: Append, token: _Row, start: Expr | int, size: int) -> None:
    """Emits code that adds the bias to `size` values of a token's queries or keys in place, from column
    `start` of qkv and of the bias on, and clips the results unless the model clips after norms instead. Both
    parts are optional: a model may have no bias, and no clipping.
    """
    clip = None if spec.clips_norms else spec.clip
    if token.bias is None and clip is None:
        return
    floats = Floats.dividing(spec.isa, size)
    with T.serial(size // floats.lanes) as k:
        at = start + k * floats.lanes
        value = floats.load(token.qkv, token.row, at)
        value = _biased(floats, value, token.bias, at)
        floats.store(token.qkv, _clipped(floats, value, clip), token.row, at)


def _biased(floats: Floats, value: Expr, bias: Buffer | None, at: Expr) -> Expr:
    return value if bias is None else value + floats.load(bias, at)


def _clipped(floats: Floats, value: Expr, clip: float | None) -> Expr:
    """Returns a vector limited to -clip .. clip; unchanged if clip is None."""
    if clip is None:
        return value
    return T.max(T.min(value, floats.constant(clip)), floats.constant(-clip))


def _write_value(
    spec: Append, tensors: tuple[_Row, Buffer], head: Expr, slot: tuple[Expr, Expr, Expr]
) -> None:
    """Emits code that adds the bias to a token's value vector of one kv head, limits its elements to -clip ..
    clip if the model has this limit, and writes it to the KV cache; for an int8 cache also to qkv, from which
    it is quantized. tensors: (buffers of the token, pages); slot: (layer, page, index of the token in the
    page)."""
    (token, pages), (layer, page, offset), heads = tensors, slot, spec.heads
    floats, start = Floats.dividing(spec.isa, heads.dim), (heads.query + heads.kv + head) * heads.dim
    with T.serial(heads.dim // floats.lanes) as k:
        at = start + k * floats.lanes
        value = _biased(floats, floats.load(token.qkv, token.row, at), token.bias, at)
        value = _clipped(floats, value, spec.clip)
        if heads.has_scales:
            floats.store(token.qkv, value, token.row, at)
        else:
            floats.store(pages, value, layer, page, 1, head, offset * heads.dim + k * floats.lanes)
    if heads.has_scales:
        place = layer, page, 1, head
        int8_cache.write(spec.isa, heads, (token.qkv, token.row, start), pages, (place, offset))
