"""Kernels that look up and dequantize rows of an embedding table, for every stored format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_op
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.format_kernels import kernel_for
from mlcbuild.compiler.cpu.kernels.vectors import (
    argument,
    i32,
    i64,
    load_f32,
    prim_func,
    shuffle,
    span,
    splat,
    typed,
)
from mlcbuild.models import Param
from mlcbuild.quant import Storage, stored
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE


@dataclass(frozen=True)
class Embedding:
    """The lookup table[tokens] in one stored table [vocab, hidden]."""

    isa: ISA
    scheme: Storage
    vocab: int
    hidden: int

    @property
    def name(self) -> str:
        return f"embedding.{self.scheme.layout}{self.scheme.bits or ''}.{self.isa.name}"

    def apply(self, tokens: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Emits the lookup of tokens, int32 [n], each in 0 .. vocab - 1 (not checked), in the table's tensors
        in stored order; returns float32 [n, hidden]."""
        out = Tensor.placeholder([tokens.shape[0], self.hidden], "float32")
        lookup = kernel(self)
        return tensor_ir_op(lookup, str(lookup.attrs["global_symbol"]), [tokens, *weights], out)


def embedding(isa: ISA, scheme: Storage, vocab: int, hidden: int) -> Embedding:
    """Returns the lookup in a table [vocab, hidden] that is stored under a scheme."""
    return Embedding(isa, scheme, vocab, hidden)


@dataclass(frozen=True)
class _Lookup:
    """One row of the table that is copied to one row of the output."""

    of: Embedding
    weights: tuple[Buffer, ...]
    out: Buffer
    token: Expr
    row: Expr

    def write(self, column: Expr, values: Expr, lanes: int) -> None:
        """Stores some columns, leaving out those beyond the table's width."""
        if self.of.hidden % GROUP == 0:
            T.buffer_store(self.out, values, [self.row, span(column, lanes)])
            return
        for lane in range(lanes):
            with T.If(column + lane < self.of.hidden), T.Then():
                value = shuffle([values], [lane]) if lanes > 1 else values
                T.buffer_store(self.out, value, [self.row, column + lane])


@cache
def kernel(of: Embedding) -> PrimFunc:
    """Returns the function (tokens, stored tensors, out) of a lookup; equal lookups share one function
    object."""
    scheme = of.scheme
    copy = {"dense": _copy_plain, "rows": _copy_row, "tiles": _copy_x16}[kernel_for(scheme)]
    kind = scheme.dtype if scheme.bits == 0 else f"{scheme.layout}{scheme.bits}_{scheme.dtype}"
    name = f"embedding_{kind}_{of.vocab}x{of.hidden}"

    def body() -> None:
        n = T.int64()
        tokens = argument("tokens", (n,), "int32")
        tensors = stored(Param("table", (of.vocab, of.hidden)), scheme)
        weights = tuple(argument("table", tensor.shape, tensor.dtype) for tensor in tensors)
        out = argument("out", (n, of.hidden), "float32")
        with T.sblock(name), T.serial(0, n) as row:
            token = T.bind(T.Cast("int64", tokens[row]))
            copy(_Lookup(of, weights, out, token, row))

    return prim_func(name, body)


def _copy_plain(of: _Lookup) -> None:
    with T.serial(0, i64(of.of.hidden)) as k:
        T.buffer_store(of.out, load_f32(of.of.isa, of.weights[0], (of.token, k), 1), [of.row, k])


def _copy_row(of: _Lookup) -> None:
    """Copies a row word by word: the 8 values (4 bits) or 4 values (8 bits) of a word are the lanes of one
    vector."""
    words, scales = of.weights
    bits = of.of.scheme.bits
    lanes = 32 // bits
    offset = 2 ** (bits - 1) - 1
    shifts = T.ramp(T.int32(0), T.int32(bits), lanes)
    with T.serial(0, words.shape[1]) as word:
        spread = splat(T.reinterpret("int32", words[of.token, word]), lanes)
        values = ((spread >> shifts) & i32(2**bits - 1, lanes)) - i32(offset, lanes)
        scale = load_f32(of.of.isa, scales, (of.token, word // bits), 1)
        of.write(word * lanes, T.Cast(typed("float32", lanes), values) * splat(scale, lanes), lanes)


def _copy_x16(of: _Lookup) -> None:
    """Copies four bytes of a row's group at a time: with 8 bits, values 4j.. ; with fewer, values 4j.. in the
    low halves and 16 + 4j.. in the high halves, and fifth bits in the bytes that follow."""
    bits = of.of.scheme.bits
    width, halves = (8, 1) if bits == 8 else (4, 2)
    words, scales = of.weights
    tile, r = of.token // TILE, of.token % TILE
    shifts = T.ramp(T.int32(0), T.int32(8), QUAD)

    def quad(group: Expr, line: Expr | int) -> Expr:
        line_bytes = words[tile, group, T.ramp(line * (TILE * QUAD) + r * QUAD, 1, QUAD)]
        return T.bind(splat(T.reinterpret("int32", line_bytes), QUAD))

    with T.serial(0, words.shape[1]) as group:
        scale = T.bind(load_f32(of.of.isa, scales, (tile, group, r), 1))
        fifth = quad(group, 4) if bits == 5 else None
        with T.serial(0, i64(QUADS // halves)) as j:
            spread = quad(group, j)
            for high in range(halves):
                field = (spread >> (shifts + i32(width * high, QUAD))) & i32(2**width - 1, QUAD)
                if fifth is not None:
                    place = shifts + splat(T.Cast("int32", j) + QUADS // 2 * high, QUAD)
                    field = field | (((fifth >> place) & i32(1, QUAD)) << i32(4, QUAD))
                values = field - i32(2 ** (bits - 1), QUAD)
                column = group * GROUP + high * (GROUP // 2) + j * QUAD
                of.write(column, T.Cast("float32x4", values) * splat(scale, QUAD), QUAD)
