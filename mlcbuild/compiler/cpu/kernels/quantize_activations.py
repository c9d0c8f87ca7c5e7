"""Emits the quantization of activations to int8 with a scale for each group of 32 along K, in the form that
int8 products read.

A group is one record of int32: the activations of its quads (four consecutive values), the scale, then
corrections: -offset times the sum of int8 activations, since stored weights are too large by `offset`; then,
for weights with minima, sums of activations. scale = max |x| / 127; values are rounded to nearest even; K is
padded with zeros to whole groups.

For 4-bit weights with one scale per group and no minima the scale is rounded up to a power of two. Then
1.5 * 2**23 times the scale is stored in its place, and its bits are added to the correction. So the corrected
integer sum of a group, read as a float32, is (1.5 * 2**23 + sum) * scale, and one subtraction leaves the
scaled sum: no conversion and no multiplication. This doubles the squared error of activations on average,
which is then 0.4 % of the error of such weights (with 5- and 8-bit weights it would be 2 % and as much as
100 %).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import dot
from mlcbuild.compiler.cpu.kernels.vectors import (
    f32,
    fma,
    i32,
    i64,
    intrinsic,
    odd_lines,
    register,
    shuffle,
    span,
    splat,
    typed,
)
from mlcbuild.quant.blocks import Blocks
from mlcbuild.quant.groups import GROUP, QUADS

_ROUNDER = 12582912.0
"""1.5 * 2**23: adding it to a small float32 leaves the nearest integer in the low bits of the sum."""
_ROUNDER_BITS = 0x4B400000
_ONE, _FRACTION = 0x3F800000, 0x007FFFFF
_LEAST, _MOST = -100, 104
"""Smallest and largest base-2 exponent of the power-of-two scales of activations. With a scale in this range,
all sums of a group are normal float32 numbers, and so is 1.5 * 2**23 times the scale."""
_TOO_LARGE = 0x76FE0000
"""The bits of 127 * 2**104 as a float32, the largest activation that int8 codes with power-of-two scales
represent.
"""
_NAN = 0x7FC00000


@dataclass(frozen=True)
class Records:
    """The layout of quantized rows of activations x [.., k] in one int32 buffer [rows, stride]: one record
    for each group of 32 values. A record holds the group's int8 values and its scale; then, for each scale of
    the weights, a correction: -offset times the sum of the int8 values, for weight codes that are too large
    by `offset`; then, if weights have minima, as many float32 sums of the values. With power-of-two scales,
    an int32 with the bits of 0.0 or NaN, from which sums start, follows the last record of a row.
    """

    dot: dot.Products
    k: int
    blocks: Blocks | None = None
    """Description of the codes, scales and minima of the weights that are multiplied; None for formats with a
    single scale per group of 32 weights and no minima.
    """

    @property
    def isa(self) -> ISA:
        return self.dot.isa

    @property
    def groups(self) -> int:
        return -(-self.k // GROUP)

    @property
    def step(self) -> int:
        """Returns the number of int32 values that hold one group of 32 quantized activations: codes, scale,
        corrections and sums.
        """
        return QUADS * self.dot.parts + self.numbers

    @property
    def numbers(self) -> int:
        """Returns the number of int32 values that follow the int8 codes of 32 activations in a buffer of
        quantized rows: their scale; for each scale of the group's weights a correction, since weight codes
        are stored unsigned; then, if weights have minima, a sum of activations for each scale.
        """
        return 1 + self.halves * (1 + self.sums)

    @property
    def powers(self) -> bool:
        """Returns True if the scales of activations are powers of two: for all 4-bit weights with one scale
        per group and no minima, and for no others."""
        return self.dot.bits == 4 and self.blocks is None

    @property
    def halves(self) -> int:
        """Returns the number of scales that a group of 32 weights has: 1, or 2 (one for each half). For each
        of them, quantized activations hold a correction: -offset times the sum of the int8 codes that it
        covers, since stored weights are too large by `offset`.
        """
        return 1 if self.blocks is None else self.blocks.halves

    @property
    def sums(self) -> bool:
        """Returns True if quantized activations also hold, for each scale of a group of 32 weights, the sum
        of the activations (int8 code times scale), with which the minima of weights are multiplied.
        """
        return self.blocks is not None and self.blocks.minimum

    @property
    def stride(self) -> int:
        return odd_lines(self.groups * self.step + self.powers)

    def activations(self, records: Buffer, row: Expr, group: Expr, quad: int) -> list[Expr]:
        count = self.dot.parts
        return [records[row, group * self.step + quad * count + part] for part in range(count)]

    def pair(self, records: Buffer, rows: tuple[Expr, Expr], group: Expr, number: int) -> Expr:
        """Returns the int8 activations of two rows of x in quads 2 * number and 2 * number + 1 of a group (a
        quad is four consecutive values), as int32 lanes [row, quad].
        """
        place = span(group * self.step + 2 * number, 2)
        return shuffle([records[row, place] for row in rows], range(4))

    def start(self, records: Buffer, row: Expr) -> Expr:
        """Returns the float32 from which the sums of a product start for a row of activations: 0, or NaN if
        the scales are powers of two and cannot represent the row, because it has a NaN or an absolute value
        above 127 * 2**104.
        """
        return T.reinterpret("float32", records[row, self.groups * self.step]) if self.powers else f32(0)

    def factors(self, records: Buffer, row: Expr, group: Expr, sums: Expr, scales: Expr) -> tuple[Expr, Expr]:
        """Returns two float32 vectors whose products are the sums of a group, with the scales of weights and
        activations applied. sums: int32 vector of products of a row's activations with weights, corrected;
        with power-of-two scales it contains the bits of 1.5 * 2**23 times the scale (see the module's
        docstring). scales: float32 vector, the scales of the weights.
        """
        floats, lanes = typed("float32", self.isa.lanes), self.isa.lanes
        stored = splat(T.reinterpret("float32", records[row, self.place(group, 0)]), lanes)
        if self.powers:
            return T.reinterpret(floats, sums) - stored, scales
        return T.Cast(floats, sums), scales * stored

    def correction(self, records: Buffer, row: Expr, group: Expr, half: int = 0) -> Expr:
        return records[row, self.place(group, 1 + half)]

    def place(self, group: Expr, number: int) -> Expr:
        """Returns the index of one number of a group of 32 quantized activations in a row of int32 words,
        where such numbers follow the group's int8 codes. number: 0 for the scale of the activations; 1 to
        `halves` for the corrections that unsigned weight codes need; the next `halves` for the sums of
        activations, stored only if weights have minima. halves: number of scales, 1 or 2, of a group of
        weights.
        """
        return group * self.step + self.step - (self.numbers - number)

    def sum(self, records: Buffer, row: Expr, group: Expr, half: int) -> Expr:
        """Returns the float32 sum of a row's quantized activations, codes times scale, in one half of a group
        of 32. It is stored only if weights have minima. half: 0 or 1; 0 is the whole group if weights have
        one scale per group."""
        return T.reinterpret("float32", records[row, self.place(group, 1 + self.halves + half)])


def quantize_row(form: Records, source: tuple[Buffer, Expr], records: Buffer, row: Expr) -> None:
    """Emits code that quantizes a float32 row of activations to int8 and writes it, in the layout that `form`
    describes, into row `row` of `records`, int32 [rows, stride]. source: (buffer float32 [.., k], index of
    the row in it).
    """
    x, line = source
    lanes = form.isa.lanes
    full_groups = form.k // GROUP
    most = register(i32(0), 1, "int32") if form.powers else None

    def quantize(group: Expr, read: Callable[[int], Expr]) -> None:
        largest = _quantize_group(form, records, row, group, read)
        if most is not None:
            most.set(T.max(most.value, largest))

    if full_groups:
        with T.serial(0, i64(full_groups)) as group:
            quantize(group, lambda v: x[line, span(group * GROUP + v * lanes, lanes)])
    if full_groups < form.groups:
        tail = T.alloc_buffer((GROUP,), "float32")
        for v in range(0, GROUP, lanes):
            T.buffer_store(tail, f32(0, lanes), [span(v, lanes)])
        with T.serial(0, i64(form.k % GROUP)) as i:
            T.buffer_store(tail, x[line, full_groups * GROUP + i], [i])
        quantize(i64(full_groups), lambda v: tail[span(v * lanes, lanes)])
    if most is not None:
        start = T.if_then_else(most.value > i32(_TOO_LARGE), i32(_NAN), i32(0))
        T.buffer_store(records, start, [row, form.groups * form.step])


def _quantize_group(
    form: Records, records: Buffer, row: Expr, group: Expr, read: Callable[[int], Expr]
) -> Expr:
    """Emits code that quantizes a group of 32 activations to int8, writes it to row `row` of `records`, and
    returns the bits of the largest |x| as an int32. It writes codes, scale, corrections (-offset times the
    sum of codes, since stored weights are too large by `offset`) and, if weights have minima, sums of code
    times scale. read: function from v, counted from 0, to the v-th vector of the group's values.
    """
    lanes = form.isa.lanes
    ints = typed("int32", lanes)
    values = [T.bind(read(v)) for v in range(GROUP // lanes)]
    # The bits of |x| as a float32 have the order of integers, so NaN needs no special case.
    sizes = [T.bind(T.reinterpret(ints, value) & i32(0x7FFFFFFF, lanes)) for value in values]
    largest = T.bind(intrinsic("int32", "llvm.vector.reduce.smax", _tree(sizes, T.max)))
    scale, factor = _power(largest) if form.powers else _quotient(largest)
    inverse = splat(factor, lanes)
    rounder, bits = f32(_ROUNDER, lanes), i32(_ROUNDER_BITS, lanes)
    integers = [T.bind(T.reinterpret(ints, fma(value, inverse, rounder, lanes)) - bits) for value in values]
    count = len(integers) // form.halves
    parts = [integers[i : i + count] for i in range(0, len(integers), count)]
    totals = [intrinsic("int32", "llvm.vector.reduce.add", _tree(part, lambda a, b: a + b)) for part in parts]
    if form.sums:
        totals = [T.bind(total) for total in totals]
    first = group * form.step
    for v, quantized in enumerate(integers):
        _store_quads(form, records, row, first + v * (lanes // 4) * form.dot.parts, quantized)
    T.buffer_store(records, scale, [row, form.place(group, 0)])
    for half, total in enumerate(totals):
        correction = total * -form.dot.offset + (scale if form.powers else 0)
        T.buffer_store(records, correction, [row, form.place(group, 1 + half)])
        if form.sums:
            weighted = T.reinterpret("int32", T.Cast("float32", total) * T.reinterpret("float32", scale))
            T.buffer_store(records, weighted, [row, form.place(group, 1 + form.halves + half)])
    return largest


def _quotient(largest: Expr) -> tuple[Expr, Expr]:
    """Returns the scale of a group of activations, max |x| / 127, as an int32 that holds its float32 bits,
    and the scale's inverse as float32. If all activations are 0, both are 0; if max |x| is NaN, the scale is
    NaN and the inverse 0. largest: the float32 bits of max |x|.
    """
    value = T.bind(T.reinterpret("float32", largest))
    inverse = T.bind(T.if_then_else(value > f32(0), f32(127) / value, f32(0)))
    return T.reinterpret("int32", value * f32(1 / 127)), inverse


def _power(largest: Expr) -> tuple[Expr, Expr]:
    """Returns the scale of a group of activations, max |x| / 127 rounded up to a power of two and limited to
    2**-100 .. 2**104 (2**104 if max |x| is NaN). The result is (the float32 bits of 1.5 * 2**23 times the
    scale, as an int32; the scale's inverse as float32). largest: the float32 bits of max |x|.
    """
    quotient = T.reinterpret("int32", T.reinterpret("float32", largest) * f32(1 / 127))
    bounded = T.max(i32(_ONE + (_LEAST << 23)), T.min(quotient, i32(_ONE + (_MOST << 23))))
    power = T.bind((bounded + i32(_FRACTION)) & i32(0xFF800000))
    scale = T.bind(power + i32(_ROUNDER_BITS - _ONE))
    return scale, T.bind(T.reinterpret("float32", i32(2 * _ONE) - power))


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
