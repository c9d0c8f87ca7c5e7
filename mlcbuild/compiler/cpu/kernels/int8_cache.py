"""Emits the parts of attention kernels that an int8 KV cache needs. Keys and values are quantized when they
are written; their scales are multiplied with scores and weights when they are read.

A key is q * s with integers q from -127 to 127 and s = max |key| / 127. So query . key = (query . q) * s: the
kernels convert q to float32 and multiply once for each token, not once for each number. In the same way the
weights of a page's tokens are multiplied by the scales of their values.
"""

from __future__ import annotations

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, registers, scratch
from mlcbuild.compiler.cpu.kernels.kv_cache import SCALE_BYTES, Heads
from mlcbuild.compiler.cpu.kernels.vectors import f32, fma, i32, intrinsic, span, typed

LARGEST = 127
"""Largest absolute value of the int8 code of a quantized key or value; the code -128 is not used."""
_LEAST = 1e-30
"""Largest value of max |x| at which a key or value x is stored as zeros, since 127 / max |x| could be
infinite.
"""
_ROUNDER, _ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""1.5 * 2**23, and its bits as a float32. Adding the number to a float32 between -2**22 and 2**22 leaves the
nearest integer in the low bits of the sum.
"""

Place = tuple[Expr | int, ...]
"""The location of keys or values in the cache: (layer, page, 0 for keys or 1 for values, kv head)."""


def scaled(floats: Floats, heads: Heads, cache: tuple[Buffer, Place], token: Expr | int, value: Expr) -> Expr:
    """Returns `value`, a vector with one element for each token of a KV cache page from `token` on,
    multiplied by the scales of these tokens; `value` itself if the cache has no scales. cache: (buffer of all
    pages, (layer, page, 0 for keys or 1 for values, kv head)).
    """
    return value * scales(floats, heads, cache, token) if heads.has_scales else value


def scales(floats: Floats, heads: Heads, cache: tuple[Buffer, Place], token: Expr | int) -> Expr:
    """Emits the load of the scales of consecutive tokens in one page of the int8 KV cache, from `token` on,
    and returns them as a float32 vector of `floats.lanes` values, one for each token. cache: (buffer of all
    pages, (layer, page, 0 for keys or 1 for values, kv head)).
    """
    pages, place = cache
    stored = pages[(*place, span(_column(heads, token), SCALE_BYTES * floats.lanes))]
    return T.bind(T.reinterpret(typed("float32", floats.lanes), stored))


def stored(floats: Floats, cache: tuple[Buffer, Place], at: Expr, factors: Expr | None) -> Expr:
    """Emits the load of `floats.lanes` consecutive numbers of the keys or values of one kv head in a KV cache
    page, from index `at` of the buffer's last dimension on. Returns them as float32 multiplied by the vector
    `factors`, with one factor per number; if `factors` is None, as a vector of their stored type. cache:
    (buffer of all pages, (layer, page, 0 for keys or 1 for values, kv head)).
    """
    pages, place = cache
    if factors is None:
        return pages[(*place, span(at, floats.lanes))]
    return floats.load(pages, *place, at) * factors


def _column(heads: Heads, token: Expr | int) -> Expr | int:
    return PAGE * heads.dim + token * SCALE_BYTES


def write(
    isa: ISA, heads: Heads, source: tuple[Buffer, Expr, Expr], pages: Buffer, slot: tuple[Place, Expr]
) -> None:
    """Emits code that quantizes a token's key or value of one head and writes it, with its scale, to the int8
    KV cache. A vector with a NaN is stored as zeros with the scale NaN. source: (buffer of queries, keys and
    values, row of the token, first column of the head); slot: ((layer, page, 0 for keys or 1 for values, kv
    head), index of the token in the page).
    """
    (qkv, row, start), (place, offset) = source, slot
    floats = Floats.dividing(isa, heads.dim)
    lanes = floats.lanes
    scale, inverse = _quotient(_largest(floats, heads.dim, source))
    integers, rounder, bits = scratch((heads.dim,), "int8"), f32(_ROUNDER, lanes), i32(_ROUNDER_BITS, lanes)
    with T.serial(heads.dim // lanes) as k:
        at = k * lanes
        sums = fma(floats.load(qkv, row, start + at), floats.spread(inverse), rounder, lanes)
        rounded = T.reinterpret(typed("int32", lanes), sums) - bits
        T.buffer_store(integers, T.Cast(typed("int8", lanes), rounded), [span(at, lanes)])
    if place[2] == 0:
        with T.serial(heads.dim) as i:
            T.buffer_store(pages, integers[i], [*place, i * PAGE + offset])
    else:
        with T.serial(heads.dim // lanes) as k:
            vector = integers[span(k * lanes, lanes)]
            T.buffer_store(pages, vector, [*place, span(offset * heads.dim + k * lanes, lanes)])
    stored = T.reinterpret(typed("int8", SCALE_BYTES), scale)
    T.buffer_store(pages, stored, [*place, span(_column(heads, offset), SCALE_BYTES)])


def _largest(floats: Floats, dim: int, source: tuple[Buffer, Expr, Expr]) -> Expr:
    """Emits a search for the largest |x| among `dim` float32 values x, and returns its float32 bits as an
    int32. Such bits have the order of integers, so that a NaN is the largest. source: (buffer, row, first
    column).
    """
    (qkv, row, start), lanes = source, floats.lanes
    ints, most = typed("int32", lanes), registers(1, lanes, "int32")[0]
    T.buffer_store(most, i32(0, lanes), [span(0, lanes)])
    with T.serial(dim // lanes) as k:
        bits = T.reinterpret(ints, floats.load(qkv, row, start + k * lanes)) & i32(0x7FFFFFFF, lanes)
        T.buffer_store(most, T.max(most[span(0, lanes)], bits), [span(0, lanes)])
    highest = most[span(0, lanes)]
    return T.bind(highest if lanes == 1 else intrinsic("int32", "llvm.vector.reduce.smax", highest))


def _quotient(largest: Expr) -> tuple[Expr, Expr]:
    """Returns (scale, inverse), both float32: the scale by which the int8 codes of a key or value are
    multiplied, max |x| / 127 over its elements x, or NaN if one is NaN; and the scale's inverse, 0 if max |x|
    <= 1e-30 or NaN. largest: the float32 bits of max |x|, an int32.
    """
    value = T.bind(T.reinterpret("float32", largest))
    inverse = T.bind(T.if_then_else(value > f32(_LEAST), f32(LARGEST) / value, f32(0)))
    return T.bind(value * f32(1 / LARGEST)), inverse


def copy_scales(heads: Heads, pages: Buffer, place: tuple[Expr, Expr, Expr], head: Expr, count: Expr) -> None:
    """Emits the copy of the int8 KV cache's scales, of keys and of values, of the first `count` tokens in the
    kv head `head` from one page to another. place: (layer, source page, destination page).
    """
    layer, source, target = place
    with T.serial(count) as token:
        where = span(_column(heads, token), SCALE_BYTES)
        for kind in range(heads.kinds):
            T.buffer_store(pages, pages[layer, source, kind, head, where], [layer, target, kind, head, where])
