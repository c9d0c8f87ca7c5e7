"""Emits reads of matrices of 4- or 8-bit weights stored row by row, with a scale for each group of 32, for
products in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.vectors import (
    argument,
    f32,
    fetch_rows,
    i32,
    i64,
    load_f32,
    repeat_each,
    span,
    typed,
)
from mlcbuild.quant.groups import GROUP


@dataclass(frozen=True)
class GroupRows:
    """Emits reads of the rows of a matrix [n, k] of 4- or 8-bit weights in blocks; an implementation of
    RowFormat in float_product.py. A block is one vector of uint32 words, each with 32 / `bits` codes. To save
    shifts, code p of a word is only masked, so its value is 2**(bits * p) times too large; x is divided by
    this factor beforehand, which is exact. Only the highest code of a word is shifted down, because it would
    include the sign bit.
    """

    isa: ISA
    n: int
    k: int
    bits: int
    dtype: str
    """Stored type of the quantization scales: float32 or float16."""

    @property
    def name(self) -> str:
        return f"w{self.bits}{'f32' if self.dtype == 'float32' else 'f16'}"

    @property
    def groups(self) -> int:
        return -(-self.k // GROUP)

    @property
    def words(self) -> int:
        """Returns the number of uint32 words of codes in a row of the matrix; each group of 32 weights takes
        `bits` words.
        """
        return self.groups * self.bits

    @property
    def lanes(self) -> int:
        """Returns the number of uint32 words in a vector. It is that of a vector register or, if a row of the
        matrix has fewer words, the largest power of two that does not exceed their number.
        """
        return min(self.isa.lanes, 1 << (self.words.bit_length() - 1))

    @property
    def planes(self) -> int:
        return 32 // self.bits

    @property
    def lane_step(self) -> int:
        return self.planes

    @property
    def plane_step(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        return -(-self.words // self.lanes)

    @property
    def row_bytes(self) -> int:
        return 4 * self.words

    @property
    def offset(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def factor(self, plane: int) -> float:
        return 1.0 if plane == self.planes - 1 else float(2 ** (self.bits * plane))

    def arguments(self) -> tuple[Buffer, ...]:
        return (
            argument("q_weight", (self.n, self.words), "uint32"),
            argument("q_scale", (self.n, self.groups), self.dtype),
        )

    def stacked(self, count: int) -> GroupRows:
        """Returns an object like this one that reads `count` quantized matrices [n, k] of the same format,
        stored one after the other as one matrix [count * n, k].
        """
        return replace(self, n=count * self.n)

    def start(self, block: Expr) -> Expr:
        return self._word(block) * self.planes

    def load(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> tuple[Expr, ...]:
        """Emits loads of one block (as many 32-bit words of codes as a vector has lanes) of row `row` of a
        matrix, and returns (vector of these uint32 words, float32 vector with the scale of the codes in each
        word). weights: the buffers of codes and of scales.
        """
        words = T.bind(weights[0][row, span(self._word(block), self.lanes)])
        count = max(1, self.lanes // self.bits)
        scales = load_f32(self.isa, weights[1], (row, self._word(block) // self.bits), count)
        return words, T.bind(repeat_each(T.bind(scales), count, self.lanes // count))

    def streamed(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        words, ints = loaded[0], typed("int32", self.lanes)
        shift = self.bits * plane
        if plane == self.planes - 1:
            field = T.reinterpret(ints, words >> T.Cast(typed("uint32", self.lanes), i32(shift, self.lanes)))
        else:
            field = T.reinterpret(ints, words) & i32((2**self.bits - 1) << shift, self.lanes)
        return T.Cast(typed("float32", self.lanes), field)

    def scale(self, loaded: tuple[Expr, ...]) -> Expr | None:
        return loaded[1]

    def unpacked(self, loaded: tuple[Expr, ...], plane: int) -> Expr:
        offset = f32(self.offset * self.factor(plane), self.lanes)
        return (self.streamed(loaded, plane) - offset) * loaded[1]

    def fetch(self, weights: Sequence[Buffer], row: Expr, block: Expr) -> None:
        fetch_rows(weights[0], row, block * self.lanes, self.row_bytes)

    def _word(self, block: Expr) -> Expr:
        """Returns the index, in a row, of the first uint32 word of a block of weights; a block has as many
        words as a vector has lanes. It starts at the first word of a quantization group of 32 weights, or
        lies inside a single group. If a row is not a whole number of blocks, its last block ends with the row
        and overlaps the block before it.
        """
        if self.words % self.lanes == 0:
            return block * self.lanes
        return T.min(block * self.lanes, i64(self.words - self.lanes))
