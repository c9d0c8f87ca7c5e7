"""Rotary position embedding, and the way of new keys and values into the cache.

Angles: Su et al., RoFormer (2021), in the half-split form that checkpoints of the Llama line use: the pair
(i, i + dim/2) turns by position * inv_freq[i].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import vectors
from mlcbuild.compiler.cpu.kernels.cache import Heads
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, size_var
from mlcbuild.compiler.cpu.kernels.norm import Norm

SERIAL_TOKENS = 4
"""Tokens whose rotation costs less than waking the other cores."""


def angles(isa: ISA, dim: int, factor: float) -> PrimFunc:
    """(positions int32 [n], inv_freq float32 [dim/2]) -> float32 [n, dim]: cosines, sines; times `factor`.

    The product is taken in float32, as checkpoints' own code does, so long contexts agree with it.
    """
    half, scalar = dim // 2, Floats(isa, 1)
    with kernel("rope_angles") as made:
        rows = size_var("n")
        positions = made.tensor("positions", (rows,), "int32")
        inv_freq = made.tensor("inv_freq", (half,))
        out = made.tensor("out", (rows, dim))

        def one_row(row: Expr) -> None:
            with T.serial(half) as i:
                angle = T.bind(T.Cast("float32", positions[row]) * inv_freq[i])
                scalar.store(out, T.cos(angle) * scalar.constant(factor), row, i)
                scalar.store(out, T.sin(angle) * scalar.constant(factor), row, half + i)

        with made.body():
            over_rows(rows, SERIAL_TOKENS, one_row)
    return made.func


@dataclass(frozen=True)
class Append:
    """What happens to a token's query, key and value between their product and attention."""

    isa: ISA
    heads: Heads
    rope_dim: int
    bias: str | None
    """Stored type of the bias of qkv."""
    norm: Norm | None
    """Of each query and key head, before the rotation."""
    norm_dtypes: tuple[str, str]
    """Stored types of its weights for queries and for keys."""


def rope_append(spec: Append) -> PrimFunc:
    """Add the bias, normalise, rotate; queries stay where they are, keys and values go into the cache.

    (angles float32 [n, rope_dim], slots int32 [n], forks int32 [f, 3], bias [width]?, q_norm [dim]?,
    k_norm [dim]?, qkv float32 [n, width] in place, pages in place, layer int64).

    Each fork is (from page, to page, tokens): after all rows, one fork after the other, so many tokens that
    a page begins with are put into another page, too. So a branch of a tree of drafts gets a last page of
    its own, and attention finds what it finds after the same tokens without a tree, lane by lane.
    """
    heads, scalar = spec.heads, Floats(spec.isa, 1)
    with kernel("rope_append") as made:
        rows = size_var("n")
        turns = made.tensor("angles", (rows, spec.rope_dim))
        slots = made.tensor("slots", (rows,), "int32")
        forks = made.tensor("forks", (size_var("f"), 3), "int32")
        bias = made.tensor("bias", (heads.width,), spec.bias) if spec.bias else None
        norms = [
            made.tensor(f"{which}_norm", (heads.dim,), dtype) if spec.norm else None
            for which, dtype in zip("qk", spec.norm_dtypes, strict=True)
        ]
        qkv = made.tensor("qkv", (rows, heads.width))
        pages = made.tensor("pages", heads.cache_shape(size_var("num_pages")), heads.dtype)
        layer = made.number("layer")

        def one_token(row: Expr) -> None:
            slot = T.bind(T.Cast("int64", slots[row]))
            page, offset = T.bind(slot // PAGE), T.bind(slot % PAGE)
            with T.serial(heads.query) as head:
                _turn(spec, (qkv, row, head * heads.dim), (turns, bias, norms[0]))
            with T.serial(heads.kv) as head:
                at = T.bind((heads.query + head) * heads.dim)
                _turn(spec, (qkv, row, at), (turns, bias, norms[1]))
                with T.serial(heads.dim) as i:
                    scalar.store(pages, qkv[row, at + i], layer, page, 0, head, i * PAGE + offset)
            with T.serial(heads.kv) as head:
                _copy_value(spec, (qkv, bias, pages), (row, head), (layer, page, offset))

        with made.body():
            over_rows(rows, SERIAL_TOKENS, one_token)
            with T.serial(forks.shape[0]) as fork:
                source, target, tokens = (T.bind(forks[fork, i]) for i in range(3))
                _fork(spec, pages, (layer, source, target), tokens)
    return made.func


def _fork(spec: Append, pages: Buffer, place: tuple[Expr, Expr, Expr], tokens: Expr) -> None:
    """The first `tokens` keys and values of a page to another one; what lies behind them there stays.
    place = (layer, from page, to page)."""
    (layer, source, target), heads = place, spec.heads
    by_token = math.gcd(PAGE, spec.isa.lanes)
    by_value = math.gcd(heads.dim, spec.isa.lanes)
    with T.serial(heads.kv) as head:
        with T.serial(heads.dim) as i, T.serial(PAGE // by_token) as part:
            first = part * by_token
            at = vectors.span(i * PAGE + first, by_token)
            token = vectors.span(T.Cast("int32", first), by_token)
            new, old = (pages[layer, page, 0, head, at] for page in (source, target))
            kept = T.Select(token < vectors.splat(tokens, by_token), new, old)
            T.buffer_store(pages, kept, [layer, target, 0, head, at])
        with T.serial(tokens) as row, T.serial(heads.dim // by_value) as part:
            at = vectors.span(row * heads.dim + part * by_value, by_value)
            T.buffer_store(pages, pages[layer, source, 1, head, at], [layer, target, 1, head, at])


def _turn(
    spec: Append, place: tuple[Buffer, Expr, Expr], given: tuple[Buffer, Buffer | None, Buffer | None]
) -> None:
    """Bias, norm and rotation of the head whose values start at `place` = (qkv, row, column)."""
    (qkv, row, start), (turns, bias, weights) = place, given
    if bias is not None:
        _add_bias(spec, place, bias)
    if spec.norm is not None and weights is not None:
        whole = spec.norm.floats
        spec.norm.row(
            lambda at: whole.load(qkv, row, start + at),
            weights,
            lambda at, value: whole.store(qkv, value, row, start + at),
        )
    half = spec.rope_dim // 2
    floats = Floats.dividing(spec.isa, half)
    with T.serial(half // floats.lanes) as k:
        i = k * floats.lanes
        a, b = (T.bind(floats.load(qkv, row, start + shift + i)) for shift in (0, half))
        cos, sin = (T.bind(floats.load(turns, row, shift + i)) for shift in (0, half))
        floats.store(qkv, a * cos - b * sin, row, start + i)
        floats.store(qkv, b * cos + a * sin, row, start + half + i)


def _add_bias(spec: Append, place: tuple[Buffer, Expr, Expr], bias: Buffer) -> None:
    qkv, row, start = place
    floats = Floats.dividing(spec.isa, spec.heads.dim)
    with T.serial(spec.heads.dim // floats.lanes) as k:
        at = start + k * floats.lanes
        floats.store(qkv, floats.load(qkv, row, at) + floats.load(bias, at), row, at)


def _copy_value(
    spec: Append,
    tensors: tuple[Buffer, Buffer | None, Buffer],
    source: tuple[Expr, Expr],
    slot: tuple[Expr, Expr, Expr],
) -> None:
    (qkv, bias, pages), (row, head), (layer, page, offset) = tensors, source, slot
    heads = spec.heads
    floats = Floats.dividing(spec.isa, heads.dim)
    with T.serial(heads.dim // floats.lanes) as k:
        at = (heads.query + heads.kv + head) * heads.dim + k * floats.lanes
        value = floats.load(qkv, row, at)
        if bias is not None:
            value = value + floats.load(bias, at)
        floats.store(pages, value, layer, page, 1, head, offset * heads.dim + k * floats.lanes)
