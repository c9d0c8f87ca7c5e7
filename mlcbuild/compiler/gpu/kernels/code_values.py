"""Emits the conversion of codes of weights to float32 in GPU kernels: of 8-bit floats, and of 4-bit codes
that stand for integers of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.tensorir import Value, bind, either, exact, floating
from mlcbuild.quant.blocks import FloatCode


def float_value(kind: FloatCode, code: Value) -> Value:
    """Returns the float32 value of a finite 8-bit float, an expression; `code` is a uint32 expression of its
    bits. Subnormal numbers are computed from their fractions, because devices may replace subnormal float32
    numbers by 0."""
    magnitude = bind(T.bitwise_and(code, T.uint32(127)))
    exponent = T.uint32((127 - kind.bias) << 23)
    bits = T.shift_left(magnitude, T.uint32(23 - kind.fraction_bits)) + exponent
    normal = bind(T.reinterpret("float32", bind(bits)))
    subnormal = floating(magnitude) * exact(2.0 ** (1 - kind.bias - kind.fraction_bits))
    value = bind(either(magnitude < T.uint32(1 << kind.fraction_bits), subnormal, normal))
    return either(code < T.uint32(128), value, -value)


def table_value(table: Sequence[int], code: Value) -> Value:
    """Returns the entry, an integer from -128 to 127, of a table of 16 at the index `code`, a uint32
    expression, as a float32 expression. The table is four constants, from which the entry's byte is cut."""
    words = [
        int.from_bytes(bytes(value & 255 for value in table[i : i + 4]), "little") for i in (0, 4, 8, 12)
    ]
    place, chosen = bind(T.shift_right(code, T.uint32(2))), T.uint32(words[3])
    for index in (2, 1, 0):
        chosen = T.Select(place == T.uint32(index), T.uint32(words[index]), chosen)
    shift = T.shift_left(T.bitwise_and(code, T.uint32(3)), T.uint32(3))
    byte = T.bitwise_and(T.shift_right(bind(chosen), shift), T.uint32(255))
    return floating(T.Cast("int32", T.bitwise_xor(byte, T.uint32(128))) - 128)
