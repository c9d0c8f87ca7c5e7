"""Emits reads of matrices of 8-bit floats stored row by row, with a scale for each group of 32, for products
in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.kernels.row_group import GroupRows
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, typed
from mlcbuild.quant.blocks import FloatCode


@dataclass(frozen=True)
class FloatCodeRows(GroupRows):
    """Emits reads of the rows of a matrix [n, k] of 8-bit floats in blocks; an implementation of RowFormat in
    float_product.py. The bits of such a float, moved to their places in a float32, are the number times a
    power of two, also for subnormal numbers."""

    code: FloatCode

    @property
    def name(self) -> str:
        return f"we{self.code.exponent_bits}m{self.code.fraction_bits}"

    @property
    def offset(self) -> float:
        return 0.0

    def factor(self, plane: int) -> float:
        return 1.0

    def streamed(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        ints = typed("int32", self.lanes)
        first = T.reinterpret(ints, loaded[0])
        highest = first << i32(24 - 8 * plane, self.lanes) if plane < 3 else first
        # An arithmetic shift keeps the sign where it is.
        moved = highest >> i32(8 - self.code.exponent_bits, self.lanes)
        bits = moved & i32((127 << (23 - self.code.fraction_bits)) - (1 << 31), self.lanes)
        scale = f32(2.0 ** (127 - self.code.bias), self.lanes)
        return T.reinterpret(typed("float32", self.lanes), bits) * scale

    def unpacked(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        return self.streamed(loaded, plane) * loaded[1]
