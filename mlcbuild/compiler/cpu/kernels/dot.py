"""Products of 4-, 5- and 8-bit weights with 8-bit activations, one group of 32 at a time, by any instruction.

A *quad* is four consecutive k. Weights of a quad are the four bytes of an int32 lane, one lane for each row
of a tile. Activations of a quad are one int32, or two where the instruction set has no byte products:
`parts` says how many. Sums over a group are exact; weights are `offset` too large, which the group's
correction (-offset times the sum of its activations) puts right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.isa import ISA, Dot
from mlcbuild.compiler.cpu.kernels.vectors import i32, intrinsic, moved, splat, typed
from mlcbuild.quant.groups import QUADS

_PAIRS_OF_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_PAIRS_OF_WORDS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}

_QUADS_OF_BYTES = {
    ("vpdpbusd", 8): "llvm.x86.avx512.vpdpbusd.256",  # LLVM encodes it as AVX-VNNI where that is all there is
    ("vpdpbusd", 16): "llvm.x86.avx512.vpdpbusd.512",
    ("sdot", 4): "llvm.aarch64.neon.sdot",
}


@dataclass(frozen=True)
class Products:
    """How weights of some bits are multiplied on an instruction set."""

    isa: ISA
    bits: int
    """4, 5 or 8."""

    @property
    def way(self) -> Dot | Literal["pmaddwd", "widening"]:
        """That of the instruction set, but where its int16 sums are too narrow for bytes of weights:
        `pmaddwd` adds pairs of int16 products into int32 lanes, `widening` adds them one by one."""
        if self.bits == 4:
            return self.isa.dot
        wide: dict[Dot, Literal["pmaddwd", "widening"]] = {"pmaddubsw": "pmaddwd", "mul16": "widening"}
        return wide.get(self.isa.dot, self.isa.dot)

    @property
    def parts(self) -> int:
        """int32 values that hold the activations of one quad; two hold those of k 0 and 2, and 1 and 3."""
        return 2 if self.way in ("pmaddwd", "mul16", "widening") else 1

    @property
    def narrow(self) -> bool:
        """Whether a group is summed in twice as many int16 lanes instead of int32 lanes."""
        return self.way in ("pmaddubsw", "mul16")

    @property
    def offset(self) -> int:
        """What operands are too large by."""
        return 0 if self.way == "sdot" and self.bits == 8 else 1 << (self.bits - 1)

    @property
    def fields(self) -> int:
        """Quads in 4 * lanes bytes of the x16 layout: j and 4 + j in the halves of each byte, or one."""
        return 1 if self.bits == 8 else 2

    def operands(self, j: int, packed: Expr, fifth: Expr | None) -> list[list[Expr]]:
        """The operands of each quad in int32 lanes of the x16 layout: the j-th 4 * lanes bytes of a group
        and, with 5 bits, those of the fifth ones."""
        lanes = self.isa.lanes
        if self.bits == 8 and self.parts == 1:
            flipped = packed ^ i32(0x80808080, lanes) if self.way == "sdot" else packed
            return [[T.bind(flipped)]]
        every = 0x00010001 if self.parts == 2 else 0x01010101
        width = 8 // self.fields

        def operand(field: int, part: int) -> Expr:
            found = moved(packed, width * field + 8 * part, lanes) & i32((2**width - 1) * every, lanes)
            if fifth is not None:
                bit = moved(fifth, j + QUADS // 2 * field + 8 * part - 4, lanes)
                found = found | (bit & i32(16 * every, lanes))
            return T.bind(found)

        return [[operand(field, part) for part in range(self.parts)] for field in range(self.fields)]

    def start(self, correction: Expr) -> Expr:
        """The accumulator at the start of a group. int16 lanes take the correction at the end: they hold the
        sums of a whole group (at most 16 * 15 * 127 = 30480), but not more."""
        if self.narrow:
            return splat(T.int16(0), 2 * self.isa.lanes)
        return splat(correction, self.isa.lanes)

    def step(self, total: Expr, weights: Expr, activations: Expr) -> Expr:
        """total plus the products of one operand and the int32 of activations that belongs to it."""
        lanes = self.isa.lanes
        both = (weights, splat(activations, lanes))
        if self.parts == 2:
            w, a = (T.reinterpret(typed("int16", 2 * lanes), operand) for operand in both)
            if self.way == "pmaddwd":
                return total + intrinsic(typed("int32", lanes), _PAIRS_OF_WORDS[lanes], w, a)
            # 255 * 127 still fits an int16.
            return total + (w * a if self.way == "mul16" else self._pair_sums(w * a))
        w, a = (T.reinterpret(typed("int8", 4 * lanes), operand) for operand in both)
        if self.way == "pmaddubsw":
            return total + intrinsic(typed("int16", 2 * lanes), _PAIRS_OF_BYTES[lanes], w, a)
        return intrinsic(typed("int32", lanes), _QUADS_OF_BYTES[self.way, lanes], total, w, a)

    def finish(self, total: Expr, correction: Expr) -> Expr:
        """The sums of a group as int32 lanes."""
        lanes = self.isa.lanes
        if self.way == "pmaddubsw":
            ones = splat(T.int16(1), 2 * lanes)
            wide = intrinsic(typed("int32", lanes), _PAIRS_OF_WORDS[lanes], total, ones)
            return wide + splat(correction, lanes)
        if self.way == "mul16":
            return self._pair_sums(total) + splat(correction, lanes)
        return total

    def _pair_sums(self, words: Expr) -> Expr:
        """Sums of neighbours in int16 lanes, as int32 lanes."""
        lanes = self.isa.lanes
        pairs = T.bind(T.reinterpret(typed("int32", lanes), words))
        return ((pairs << i32(16, lanes)) >> i32(16, lanes)) + (pairs >> i32(16, lanes))
