"""Activations as int8 with a scale for each group of 32 along K, as the int8 products read them.

A group is one record of int32: the activations of its quads (see dot), the scale's bits, the correction.
scale = max |x| / 127; values are rounded to nearest even; K is padded with zeros to whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.kernels import dot
from mlcbuild.compiler.kernels.isa import ISA
from mlcbuild.compiler.kernels.vectors import (
    f32,
    fma,
    i32,
    i64,
    intrinsic,
    odd_lines,
    shuffle,
    span,
    splat,
    typed,
)

GROUP = 32
_ROUNDER = 12582912.0
"""1.5 * 2**23: adding it to a small float32 leaves the nearest integer in the low bits."""
_ROUNDER_BITS = 0x4B400000


@dataclass(frozen=True)
class Records:
    """Quantized rows of x [.., k] in one int32 buffer [rows, stride]."""

    dot: dot.Products
    k: int

    @property
    def isa(self) -> ISA:
        return self.dot.isa

    @property
    def groups(self) -> int:
        return -(-self.k // GROUP)

    @property
    def step(self) -> int:
        """int32 values in a record."""
        return dot.QUADS * self.dot.parts + 2

    @property
    def stride(self) -> int:
        return odd_lines(self.groups * self.step)

    def activations(self, records: Buffer, row: Expr, group: Expr, quad: int) -> list[Expr]:
        count = self.dot.parts
        return [records[row, group * self.step + quad * count + part] for part in range(count)]

    def scale(self, records: Buffer, row: Expr, group: Expr) -> Expr:
        return T.reinterpret("float32", records[row, group * self.step + self.step - 2])

    def correction(self, records: Buffer, row: Expr, group: Expr) -> Expr:
        return records[row, group * self.step + self.step - 1]


def quantize_row(form: Records, source: tuple[Buffer, Expr], records: Buffer, row: Expr) -> None:
    """Emit: a row of float32, source = (buffer, row), into one row of records."""
    x, line = source
    lanes = form.isa.lanes
    whole = form.k // GROUP
    if whole:
        with T.serial(0, i64(whole)) as group:
            _quantize_group(
                form, records, row, group, lambda v: x[line, span(group * GROUP + v * lanes, lanes)]
            )
    if whole < form.groups:
        tail = T.alloc_buffer((GROUP,), "float32")
        for v in range(0, GROUP, lanes):
            T.buffer_store(tail, f32(0, lanes), [span(v, lanes)])
        with T.serial(0, i64(form.k % GROUP)) as i:
            T.buffer_store(tail, x[line, whole * GROUP + i], [i])
        _quantize_group(form, records, row, i64(whole), lambda v: tail[span(v * lanes, lanes)])


def _quantize_group(
    form: Records, records: Buffer, row: Expr, group: Expr, read: Callable[[int], Expr]
) -> None:
    """`read(v)` gives vector v of the group's values."""
    lanes = form.isa.lanes
    ints = typed("int32", lanes)
    values = [T.bind(read(v)) for v in range(GROUP // lanes)]
    # |x| as the bits of a float32 is ordered like an integer: no care for NaN is needed.
    sizes = [T.bind(T.reinterpret(ints, value) & i32(0x7FFFFFFF, lanes)) for value in values]
    largest = T.reinterpret("float32", intrinsic("int32", "llvm.vector.reduce.smax", _tree(sizes, T.max)))
    largest = T.bind(largest)
    inverse = splat(T.bind(T.if_then_else(largest > f32(0), f32(127) / largest, f32(0))), lanes)
    rounder, bits = f32(_ROUNDER, lanes), i32(_ROUNDER_BITS, lanes)
    whole = [T.bind(T.reinterpret(ints, fma(value, inverse, rounder, lanes)) - bits) for value in values]
    total = intrinsic("int32", "llvm.vector.reduce.add", _tree(whole, lambda a, b: a + b))
    first = group * form.step
    for v, quantized in enumerate(whole):
        _store_quads(form, records, row, first + v * (lanes // 4) * form.dot.parts, quantized)
    T.buffer_store(records, T.reinterpret("int32", largest * f32(1 / 127)), [row, first + form.step - 2])
    T.buffer_store(records, total * -form.dot.offset, [row, first + form.step - 1])


def _tree(values: list[Expr], join: Callable[[Expr, Expr], Expr]) -> Expr:
    while len(values) > 1:
        values = [T.bind(join(a, b)) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _store_quads(form: Records, records: Buffer, row: Expr, place: Expr, quantized: Expr) -> None:
    lanes = form.isa.lanes
    if form.dot.parts == 2:
        order = [quad + part + step for quad in range(0, lanes, 4) for part in (0, 1) for step in (0, 2)]
        quantized = shuffle([quantized], order)
    kind, count = f"int{8 * form.dot.parts}", lanes // 4 * form.dot.parts
    packed = T.reinterpret(typed("int32", count), T.Cast(typed(kind, lanes), quantized))
    T.buffer_store(records, packed, [row, span(place, count)])
