"""Emits elementary functions for values that will be rounded to bfloat16, in a few AVX-512
instructions each.
"""

from __future__ import annotations

import math

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.kernels.floats import Floats
from mlcbuild.compiler.cpu.kernels.vectors import intrinsic

_NODES = (np.cos((np.arange(4) + 0.5) * np.pi / 4) + 1) / 2
_EXP2: list[float] = np.polynomial.Polynomial.fit(_NODES, np.exp2(_NODES), 3).convert().coef.tolist()
_EVERY, _CURRENT = T.int16(-1), T.int32(4)
"""A mask with all lanes set, and the code for the current rounding mode, as AVX-512 intrinsics take them."""


class Rough(Floats):
    """Emits arithmetic on vectors of 16 float32 lanes with AVX-512. exp2 and sigmoid are approximations with
    relative errors below 1.3e-4, a fifteenth of the rounding error of bfloat16.
    """

    def exp2(self, x: Expr) -> Expr:
        """Emits 2^x for a vector of 16 float32 values and returns it; zero if that is below the range of
        float32, infinite if it is above.
        """
        x = T.bind(x)
        name, floor = "llvm.x86.avx512.mask.reduce.ps.512", T.int32(1)
        part = T.bind(intrinsic("float32x16", name, x, floor, x, _EVERY, _CURRENT))
        value = self.constant(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            value = self.fma(value, part, self.constant(coefficient))
        value = T.bind(value)
        name = "llvm.x86.avx512.mask.scalef.ps.512"  # value * 2^floor(x)
        return T.bind(intrinsic("float32x16", name, value, x, value, _EVERY, _CURRENT))

    def sigmoid(self, x: Expr) -> Expr:
        total = T.bind(self.constant(1.0) + self.exp2(x * self.constant(-1 / math.log(2))))
        return intrinsic("float32x16", "llvm.x86.avx512.rcp14.ps.512", total, total, _EVERY)
