"""Emits the conversion of 8-bit floats to float32 in GPU kernels."""

from __future__ import annotations

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
