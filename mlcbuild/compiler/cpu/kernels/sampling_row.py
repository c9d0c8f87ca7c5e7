"""Emits code of the sampling kernel that reads one row of logits in blocks of 256 tokens and stores, for each
block, the largest logit and the sum of the tokens' sampling weights, exp((logit - m) / temperature), where m
is the largest logit of the row or, at first, of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
from mlcbuild_format.abi import SAMPLING_COLUMNS
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.floats import Floats
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, register, typed

BLOCK = 256
"""Number of tokens in one block of a row of logits. For each block, the sampling kernel stores the largest
logit and the sum of the tokens' sampling weights. The benchmark `ci/bench/step` compares decode steps that
sample with greedy ones.
"""
TASK = 16
"""Number of blocks, of 256 logits each, in one parallel task of the sampling kernel's first pass over a row.
On a core of Zen 5, the pass takes up to 11 % longer with 4 blocks than with 16, and up to 3 % less with 64,
which leave cores idle (`ci/bench/constants`).
"""
INVERSE_TEMPERATURE = SAMPLING_COLUMNS.index("inverse_temperature")
FAR = 87.0
"""Distance below the largest logit, in units of the temperature, at which a token's weight becomes 0: e^-87
is 1e-38."""

_ROUND = 1.5 * 2.0**23
"""1.5 * 2**23: adding it to a small float32 leaves the nearest integer in the low bits of the sum."""
_NODES = np.cos((np.arange(6) + 0.5) * np.pi / 6) / 2
_EXP2: list[float] = np.polynomial.Polynomial.fit(_NODES, np.exp2(_NODES), 5).convert().coef.tolist()
_EXP2[0] = 1.0

Read = Callable[[Expr], Expr]

_BLOCKS = """
define linkonce_odr i32 @mlcbuild_put(ptr %place, float %value) alwaysinline nounwind {
  store float %value, ptr %place
  ret i32 0
}
define linkonce_odr ptr @mlcbuild_choose(i1 %first, ptr %one, ptr %other) alwaysinline nounwind {
  %chosen = select i1 %first, ptr %one, ptr %other
  ret ptr %chosen
}
"""
"""LLVM code of two functions: a store of a float32, and the choice of one of two addresses. TVM has no
expression for the choice, and marks each of its own stores as one that no load of another buffer reads, such
as a load from the chosen address.
"""


def reading_blocks() -> AbstractContextManager[None]:
    """Returns a context manager without a value, inside which methods of Row that read blocks of logits may
    be called.
    """
    return cast(AbstractContextManager[None], T.attr(T.int32(0), "pragma_import_llvm", _BLOCKS))


@dataclass(frozen=True)
class LogitBlock:
    """The logits of one block of 256 tokens, read from a row of logits or from the padded copy of the row's
    last block, whose padding is minus infinity.
    """

    buffer: Buffer

    def load(self, floats: Floats, at: Expr | int) -> Expr:
        return floats.load(self.buffer, at)


@dataclass(frozen=True)
class Row:
    """One row of logits with its sampling parameters, read in blocks of 256 tokens, and the buffers that hold
    each block's largest logit and the sum of its tokens' sampling weights.
    """

    floats: Floats
    row: Expr
    logits: Buffer  # [., ., v], rows in order
    sampling_params: Buffer  # float64 [q, SAMPLING_COLUMNS]
    tops: Buffer  # [q, stride], the largest logit of each block; infinite if one is NaN
    sums: Buffer  # [q, stride], the weight of each block's tokens
    tail: Buffer  # [BLOCK], the last block, if it is not whole
    width: Expr
    blocks: Expr

    def parameter(self, column: str) -> Expr:
        """Emits a load of a sampling parameter of the row and returns it, float64. column: the parameter's
        name, such as top_p.
        """
        return T.bind(self.sampling_params[self.row, SAMPLING_COLUMNS.index(column)])

    @property
    def scale(self) -> Expr:
        return T.bind(T.Cast("float32", self.sampling_params[self.row, INVERSE_TEMPERATURE]))

    @property
    def filtered(self) -> Expr:
        dropped = self.parameter("logit_drop") > T.float64(-math.inf)
        some = T.Or(dropped, self.parameter("top_p") < T.float64(1))
        return T.bind(T.Or(some, self.parameter("top_k") > T.float64(0)))

    def top(self, block: Expr) -> Expr:
        return T.bind(self.tops[self.row, block])

    def fill_tail(self) -> None:
        full_width = T.bind(self.width // BLOCK * BLOCK)
        with T.If(full_width < self.width), T.Then():
            with T.serial(BLOCK) as at:
                self._put(at, infinity(-1))
            with T.serial(self.width - full_width) as at:
                self._put(at, self.logits[0, self.row, full_width + at])

    def _put(self, at: Expr, value: Expr) -> None:
        T.evaluate(T.call_extern("int32", "mlcbuild_put", T.address_of(self.tail[at]), value))

    def logit_block(self, block: Expr) -> LogitBlock:
        """Emits code that chooses where the block of 256 logits with the index `block` is read, and returns
        it: in the row itself for a full block, else in the copy of the row's last block, padded with minus
        infinity.
        """
        start = T.bind(block * BLOCK)
        # Rows are contiguous, whichever of two dimensions counts them.
        places = T.address_of(self.logits[0, self.row, start]), T.address_of(self.tail[0])
        whole = start + BLOCK <= self.width
        chosen = T.bind(T.call_extern(places[0].ty, "mlcbuild_choose", whole, *places))
        return LogitBlock(T.decl_buffer((BLOCK,), "float32", data=chosen, align=4))

    def vectors(self, emit: Callable[[Expr], None]) -> None:
        with T.serial(BLOCK // self.floats.lanes) as k:
            emit(T.bind(k * self.floats.lanes))

    def weight(self, floats: Floats, logit: Expr, highest: Expr) -> Expr:
        """Emits the sampling weight e^((logit - highest) / temperature) of a vector of logits and returns it;
        0 where a logit is more than 87 times the temperature below `highest`.

        The integer part of the base-2 exponent goes into the exponent bits, and a polynomial of the rest,
        from -1/2 to 1/2, into the others; the polynomial's relative error is 1e-7.
        """
        dtype, ints = typed("float32", floats.lanes), typed("int32", floats.lanes)
        scale = T.bind(self.scale * T.float32(1 / math.log(2)))
        distance = T.bind(logit - floats.spread(highest))
        below = T.bind(distance * floats.spread(scale))
        # The fused intrinsic is opaque to TVM, which would otherwise simplify the addition and subtraction
        # away.
        shifted = T.bind(floats.fma(distance, floats.spread(scale), floats.constant(_ROUND)))
        left = T.bind(below - (shifted - floats.constant(_ROUND)))
        value = floats.constant(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            value = floats.fma(value, left, floats.constant(coefficient))
        bits = T.reinterpret(ints, value) + (T.reinterpret(ints, shifted) << i32(23, floats.lanes))
        power = T.reinterpret(dtype, bits)
        return T.Select(below >= floats.constant(-FAR / math.log(2)), power, floats.constant(0.0))


def infinity(sign: int, lanes: int = 1) -> Expr:
    return T.reinterpret(typed("float32", lanes), i32(0x7F800000 if sign > 0 else 0xFF800000, lanes))


def sum_block(row: Row, block: Expr, value: Read) -> None:
    """Emits the sum of the sampling weights of the 256 tokens in one block of a row of logits, and its store
    in row.sums. value: function from an index in the block to the vector of weights that starts there.
    """
    floats = row.floats
    total = register(f32(0, floats.lanes), floats.lanes)
    row.vectors(lambda at: total.set(total.value + value(at)))
    T.buffer_store(row.sums, floats.fold(total.value, lambda a, b: a + b), [row.row, block])
