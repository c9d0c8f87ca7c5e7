"""Emits the kernels around the matrix products of latent attention (MLA): they write a token's latent to the
KV cache and assemble queries in the space of latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, scratch, size_var
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.vectors import argument
from mlcbuild.models import LatentAttention

SERIAL_TOKENS = 4
"""Maximum number of tokens whose latents one core writes to the KV cache alone, since waking the other cores
would take longer; `ci/bench/kernels --threads 2` prints how long waking takes."""


@dataclass(frozen=True)
class Leading:
    """The input of a matrix product that consists of the first k columns of each row of x, float32 [m,
    columns]. The product reads them in place; nothing is computed.
    """

    columns: int
    packed = False

    @property
    def name(self) -> str:
        return "leading_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        return (argument("x", (m, self.columns), "float32"),)

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        return arguments[0], row


def every_head(isa: ISA, heads: int) -> PrimFunc:
    """Returns the kernel that writes choices float32 [n, 2 * heads]: each row holds the numbers 0 to heads -
    1, and then `heads` weights of 1. Latent attention passes them to kernels of mixture-of-experts products,
    which then multiply each row with the matrices of all heads.
    """
    scalar = Floats(isa, 1)
    with kernel("every_head") as built:
        rows = size_var("n")
        choices = built.tensor("choices", (rows, 2 * heads))
        with built.body(), T.serial(rows) as row, T.serial(heads) as head:
            T.buffer_store(choices, T.Cast("float32", head), [row, head])
            scalar.store(choices, scalar.constant(1.0), row, heads + head)
    return built.func


@dataclass(frozen=True)
class LatentAppend:
    """Describes the kernel that prepares tokens for latent attention. It runs after the products that compute
    queries and latents, and before attention itself."""

    isa: ISA
    spec: LatentAttention
    heads: Heads
    norm: Norm
    """The norm (RMSNorm or LayerNorm, its size, epsilon and stored type of weights) that is applied to each
    token's latent.
    """
    bias: str | None
    """Stored type of the bias that is added to a token's latent and shared key before the norm; None: there
    is no bias.
    """


@dataclass(frozen=True)
class _Call:
    angles: Buffer
    bias: Buffer | None
    weight: Buffer
    head_queries: Buffer
    absorbed: Buffer
    tokens: Buffer
    queries: Buffer
    pages: Buffer
    layer: Expr


def latent_append(form: LatentAppend) -> PrimFunc:
    """Returns the kernel that prepares new tokens for latent attention (MLA). Its arguments are (angles
    float32 [n, rope_dim]: cosines, then sines; slots int32 [n]: a token's index in the KV cache, page * 16 +
    index in the page; forks int32 [f, 3]; bias [cached] if there is one; norm weight [latent]; own float32
    [n, heads * query_dim]; absorbed float32 [n, heads * latent]; tokens float32 [n, cached]; queries float32
    [n, heads * cached] out; pages, the KV cache, in place; layer int64). cached = latent + rope_dim.

    A row of `tokens`, a token's latent and its shared key, gets the bias; then the latent is normalized, the
    key rotated, and the row written to `pages`. `own` and `absorbed` hold each head's query before and after
    its multiplication with the head's key matrix. A head's query over cached rows, in `queries`, is
    `absorbed` followed by the last rope_dim values of `own`, rotated. Forks (source page, destination page,
    tokens) copy the first tokens of pages afterwards.
    """
    spec, heads = form.spec, form.heads
    with kernel("latent_append") as built:
        rows = size_var("n")
        angles = built.tensor("angles", (rows, spec.rope_dim))
        slots = built.tensor("slots", (rows,), "int32")
        forks = built.tensor("forks", (size_var("f"), 3), "int32")
        call = _Call(
            angles,
            built.tensor("bias", (spec.cached,), form.bias) if form.bias else None,
            built.tensor("norm_weight", (spec.latent,), form.norm.weight or "float32"),
            built.tensor("own", (rows, spec.heads * spec.query_dim)),
            built.tensor("absorbed", (rows, spec.heads * spec.latent)),
            built.tensor("tokens", (rows, spec.cached)),
            built.tensor("queries", (rows, spec.heads * spec.cached)),
            built.tensor("pages", heads.cache_shape(size_var("num_pages")), heads.dtype),
            built.number("layer"),
        )

        def one_token(row: Expr) -> None:
            _cache(form, call, row, T.bind(T.Cast("int64", slots[row])))
            with T.serial(spec.heads) as head:
                _query(form, call, row, head)

        with built.body():
            over_rows(rows, SERIAL_TOKENS, one_token)
            with T.serial(forks.shape[0]) as fork:
                source, target, count = (T.bind(forks[fork, i]) for i in range(3))
                _fork(form, call, (source, target), count)
    return built.func


def _cache(form: LatentAppend, call: _Call, row: Expr, slot: Expr) -> None:
    spec, floats, norm = form.spec, Floats.dividing(form.isa, form.spec.cached), form.norm
    line = scratch((1, spec.cached))
    with T.serial(spec.cached // floats.lanes) as k:
        at = k * floats.lanes
        value = floats.load(call.tokens, row, at)
        floats.store(line, value if call.bias is None else value + floats.load(call.bias, at), 0, at)
    norm_floats = norm.floats
    norm.row(
        lambda at: norm_floats.load(line, 0, at),
        (call.weight, None),
        lambda at, value: norm_floats.store(line, value, 0, at),
    )
    shared = line, T.int64(0), T.int64(spec.latent)
    _rotate(form, call, row, shared, shared)
    page, start = T.bind(slot // PAGE), T.bind(slot % PAGE * spec.cached)
    with T.serial(spec.cached // floats.lanes) as k:
        at = k * floats.lanes
        floats.store(call.pages, floats.load(line, 0, at), call.layer, page, 0, 0, start + at)


def _query(form: LatentAppend, call: _Call, row: Expr, head: Expr) -> None:
    spec, floats = form.spec, Floats.dividing(form.isa, form.spec.latent)
    start = T.bind(head * spec.cached)
    with T.serial(spec.latent // floats.lanes) as k:
        at = k * floats.lanes
        floats.store(call.queries, floats.load(call.absorbed, row, head * spec.latent + at), row, start + at)
    column = T.bind(head * spec.query_dim + spec.head_dim)
    _rotate(form, call, row, (call.head_queries, row, column), (call.queries, row, start + spec.latent))


def _rotate(
    form: LatentAppend,
    call: _Call,
    row: Expr,
    source: tuple[Buffer, Expr, Expr],
    target: tuple[Buffer, Expr, Expr],
) -> None:
    """Emits the rotary embedding of rope_dim values of one token, in pairs (i, i + rope_dim / 2), by the
    cosines and sines in row `row` of call.angles. source, target: (buffer, row, first column) of the values
    before and after.
    """
    half = form.spec.rope_dim // 2
    floats = Floats.dividing(form.isa, half)
    (x, line, start), (out, out_row, out_start) = source, target
    with T.serial(half // floats.lanes) as k:
        i = k * floats.lanes
        a, b = (T.bind(floats.load(x, line, start + shift + i)) for shift in (0, half))
        cos, sin = (T.bind(floats.load(call.angles, row, shift + i)) for shift in (0, half))
        floats.store(out, a * cos - b * sin, out_row, out_start + i)
        floats.store(out, b * cos + a * sin, out_row, out_start + half + i)


def _fork(form: LatentAppend, call: _Call, places: tuple[Expr, Expr], count: Expr) -> None:
    """Emits the copy of the first `count` tokens of one page of the KV cache to another one, in the layer of
    the call. places: (source page, destination page).
    """
    (source, target), floats = places, Floats.dividing(form.isa, form.spec.cached)
    with T.serial(count) as token, T.serial(form.spec.cached // floats.lanes) as k:
        at = token * form.spec.cached + k * floats.lanes
        value = floats.load(call.pages, call.layer, source, 0, 0, at)
        floats.store(call.pages, value, call.layer, target, 0, 0, at)
