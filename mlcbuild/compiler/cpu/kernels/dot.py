"""Emits products of 3- to 8-bit weights with 8-bit activations, one group of 32 at a time, for any
instruction set.

A *quad* is four consecutive k. The weights of a quad are the four bytes of an int32 lane, one lane for each
row of a tile. The activations of a quad are one int32, or two (`parts`) if the instruction set has no byte
products. Sums over a group are exact. Stored weights are too large by `offset`, which the group's correction
(-offset times the sum of its activations) compensates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.isa import ISA, Dot
from mlcbuild.compiler.cpu.kernels.vectors import i32, intrinsic, moved, shuffle, splat, typed
from mlcbuild.quant.groups import QUADS, low_bits

_PAIRS_OF_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_PAIRS_OF_WORDS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}

_QUADS_OF_BYTES = {
    # LLVM encodes it as AVX-VNNI if the processor has no more
    ("vpdpbusd", 8): "llvm.x86.avx512.vpdpbusd.256",
    ("vpdpbusd", 16): "llvm.x86.avx512.vpdpbusd.512",
    ("sdot", 4): "llvm.aarch64.neon.sdot",
}


_LOOKUPS: Mapping[tuple[Dot, int], str] = {
    ("pmaddubsw", 8): "llvm.x86.avx2.pshuf.b",
    ("vpdpbusd", 8): "llvm.x86.avx2.pshuf.b",
    ("pmaddubsw", 16): "llvm.x86.avx512.pshuf.b.512",
    ("vpdpbusd", 16): "llvm.x86.avx512.pshuf.b.512",
    ("sdot", 4): "llvm.aarch64.neon.tbl1.v16i8",
}
"""(Products of an instruction set, float32 lanes of its registers) -> the intrinsic that replaces each byte
of a register, 0 to 15, by the entry with this index of a table of 16 bytes, which each 128 bits of another
register hold."""


def looked_up(codes: Expr, table: Sequence[int], dtype: str, lanes: int) -> Expr:
    """Returns the entries of a table of 16 with the indices `codes`, a vector of `lanes` integers of the type
    `dtype`, as a vector of this type. It halves the table by each bit of the codes, for processors without an
    instruction that looks up."""

    def every(value: int) -> Expr:
        return splat(T.IntImm(dtype, value), lanes)

    # All bits of a mask are ones where the bit of the code is one.
    masks = [T.bind(every(0) - ((codes >> every(bit)) & every(1))) for bit in range(4)]
    pairs = zip(table[::2], table[1::2], strict=True)
    values = [T.bind(every(even) ^ (masks[0] & every(even ^ odd))) for even, odd in pairs]
    for mask in masks[1:]:
        halves = zip(values[::2], values[1::2], strict=True)
        values = [T.bind(even ^ (mask & (even ^ odd))) for even, odd in halves]
    return values[0]


_IN_ORDER = """
define linkonce_odr <{0} x i{1}> @mlcbuild_in_order_{1}(<{0} x i{1}> %sums) alwaysinline nounwind {{
  %same = call <{0} x i{1}> asm sideeffect "", "=v,0"(<{0} x i{1}> %sums) memory(none)
  ret <{0} x i{1}> %same
}}
"""
"""LLVM code of a function that returns its argument, a vector of integer sums, and keeps LLVM from reordering
the products that are added. Otherwise it adds them as a tree, and computes one column of a register tile
after the other, for which a tile of 4 x 2 vectors needs more than the 16 registers of AVX2: its 8 vectors of
int16 sums, two of weights and one of activations fit, and its float32 sums are in memory until a group of
weights ends."""


@dataclass(frozen=True)
class Products:
    """The instructions by which an instruction set multiplies weights of a given number of bits with
    activations.
    """

    isa: ISA
    bits: int
    """Number of bits of a weight: 3, 4, 5, 6 or 8."""
    signed: bool = True
    """True if weights may be negative; their stored codes are then too large by 2**(bits - 1)."""
    table: tuple[int, ...] | None = None
    """The integers, -128 to 127, for which 4-bit codes stand; products then read these integers, like 8-bit
    weights. None: codes stand for themselves."""

    @property
    def way(self) -> Dot | Literal["pmaddwd", "widening"]:
        """Returns the name of the way in which weights are multiplied with activations. It is that of the
        instruction set, such as "vpdpbusd" (`ISA.dot`), except for weights whose products its int16 lanes do
        not hold: "pmaddwd" instead of "pmaddubsw" for 8 bits adds pairs of int16 products to int32 lanes in
        one instruction, "widening" instead of "mul16" for 5 bits and more multiplies in int16 lanes and adds
        pairs of products to int32 lanes with several.
        """
        if self.table is None and self.bits <= (6 if self.isa.dot == "pmaddubsw" else 4):
            return self.isa.dot
        wide: dict[Dot, Literal["pmaddwd", "widening"]] = {"pmaddubsw": "pmaddwd", "mul16": "widening"}
        return wide.get(self.isa.dot, self.isa.dot)

    @property
    def parts(self) -> int:
        """Returns the number of int32 values that hold the activations of four consecutive k (the summed
        dimension): 1 for four int8 values; 2 for int16 values, where the first holds k 0 and 2, the second k
        1 and 3.
        """
        return 2 if self.way in ("pmaddwd", "mul16", "widening") else 1

    @property
    def narrow(self) -> bool:
        """Returns True if products are summed in int16 lanes, twice as many as int32 lanes, before the sums
        are widened to int32.
        """
        return self.way in ("pmaddubsw", "mul16")

    @property
    def run(self) -> int:
        """Returns the number of quads whose products are summed before the sums are widened: all 8 of a group
        if int16 lanes hold them, as for 4 bits (16 * 15 * 127 = 30480), or if sums are int32; 4 for 5 bits
        (8 * 31 * 127 = 31496), 2 for 6 bits (4 * 63 * 127 = 32004).
        """
        return 16 >> max(self.bits - 3, 1) if self.narrow else QUADS

    @property
    def offset(self) -> int:
        """Returns the number that must be subtracted from stored codes, as the dot-product instruction reads
        them, to get the integer weights; 0 if the codes are the weights.
        """
        if self.table is not None:
            return 0 if self.way == "sdot" else 128
        if not self.signed or (self.way == "sdot" and self.bits == 8):
            return 0
        return 1 << (self.bits - 1)

    @property
    def row_pairs(self) -> bool:
        """Returns True if one instruction (Arm's smmla) multiplies two rows of activations x at once. Its
        sums equal those of the instructions for single rows.
        """
        return self.isa.smmla and self.way == "sdot"

    @property
    def high_lines(self) -> int:
        """Returns how many vector registers hold the high bits of codes, those above `low_bits`, for 32
        columns of as many weight rows as a register has int32 lanes: 1 if codes have 3 or 5 bits, 2 if they
        have 6, 0 if they have 4 or 8.
        """
        return self.bits - low_bits(self.bits)

    @property
    def fields(self) -> int:
        """Returns the number of weights in one byte of the codes of a tile: 2 with 4 to 6 bits, where a byte
        holds the low four bits of two weights, 4 with 3 bits, where it holds the low two bits of four, or 1
        with 8 bits.
        """
        return 8 // low_bits(self.bits)

    def unpacked_order(self, quads: Sequence[int]) -> list[int]:
        """Returns quads (four consecutive columns) of a group in an order in which those whose codes share
        bytes follow each other, so that few registers hold packed codes."""
        lines = QUADS // self.fields
        return sorted(quads, key=lambda quad: (quad % lines, quad))

    def operands(self, j: int, packed: Expr, high: Sequence[Expr]) -> list[list[Expr]]:
        """Returns the operands of the dot-product instruction that are unpacked from weight codes: a list for
        each quad (four consecutive columns) in `packed`, with its one or two operands, int32 vectors with a
        lane for each weight row. packed: one int32 vector, with four bytes for each row; j: its index among
        the vectors that hold the low bits of the codes of a group of 32 columns; high: the group's vectors
        that hold the other bits of its codes, empty if there are none.
        """
        lanes = self.isa.lanes
        if self.bits == 8 and self.parts == 1:
            flipped = packed ^ i32(0x80808080, lanes) if self.way == "sdot" else packed
            return [[flipped]]
        every = 0x00010001 if self.parts == 2 else 0x01010101
        width = 8 // self.fields

        def operand(field: int, part: int) -> Expr:
            value = moved(packed, width * field + 8 * part, lanes) & i32((2**width - 1) * every, lanes)
            if high:
                bits = len(high)
                line, place = divmod(bits * (j + QUADS // self.fields * field), 8)
                above = moved(high[line], place + 8 * part - width, lanes)
                value = value | (above & i32(((2**bits - 1) << width) * every, lanes))
            return value if self.table is None else self._looked_up(value, self.table)

        return [[operand(field, part) for part in range(self.parts)] for field in range(self.fields)]

    def _looked_up(self, codes: Expr, table: Sequence[int]) -> Expr:
        """Returns the integers plus `offset` for which 4-bit codes stand, in the places of the codes: the
        bytes or, with two parts, the int16 halves of int32 lanes."""
        lanes, entries = self.isa.lanes, [(value + self.offset) & 255 for value in table]
        lookup = _LOOKUPS.get((self.isa.dot, lanes))
        if lookup is None:
            assert self.parts == 2, "only instruction sets without shuffles of bytes have none"
            halves = T.bind(T.reinterpret(typed("int16", 2 * lanes), codes))
            chosen = looked_up(halves, entries, "int16", 2 * lanes)
            return T.reinterpret(typed("int32", lanes), chosen)
        words = [int.from_bytes(bytes(entries[i : i + 4]), "little", signed=True) for i in (0, 4, 8, 12)]
        row = shuffle([i32(word) for word in words] * (lanes // 4), range(lanes))
        kind = typed("int8", 4 * lanes)
        integers = intrinsic(kind, lookup, T.reinterpret(kind, row), T.reinterpret(kind, codes))
        values = T.reinterpret(typed("int32", lanes), integers)
        return values & i32(0x00FF00FF, lanes) if self.parts == 2 else values

    def paired(self, operands: Sequence[list[Expr]]) -> list[list[Expr]]:
        """Emits code that rearranges the weights of a group of 32 columns for Arm's smmla instruction.
        Returns two vectors for each eight consecutive k (the summed dimension): those of weight rows 0 and 1,
        and those of weight rows 2 and 3. operands: one vector for each four consecutive k.
        """
        pairs = [(low[0], high[0]) for low, high in zip(operands[::2], operands[1::2], strict=True)]
        orders = ([0, 4, 1, 5], [2, 6, 3, 7])
        return [[T.bind(shuffle(pair, order))] for pair in pairs for order in orders]

    def pair_step(self, total: Expr, weights: Expr, activations: Expr) -> Expr:
        """Returns `total` plus the products, over eight k (the summed dimension), of two rows of x and two
        rows of weights: int32 sums [row of x, row of weights] in four lanes.

        weights, activations: int32x4 with the eight int8 values of the first row, then those of the second.
        """
        bytes_of = [T.reinterpret("int8x16", operand) for operand in (activations, weights)]
        return intrinsic("int32x4", "llvm.aarch64.neon.smmla", total, *bytes_of)

    def adding(self) -> AbstractContextManager[None]:
        """Returns a context manager without a value, inside which code of `step` must be emitted."""
        if self.way not in ("pmaddubsw", "pmaddwd"):
            return nullcontext()
        bits = 16 if self.narrow else 32
        text = _IN_ORDER.format(32 * self.isa.lanes // bits, bits)
        return cast(AbstractContextManager[None], T.attr(T.int32(0), "pragma_import_llvm", text))

    def start(self, correction: Expr) -> Expr:
        """Returns the vector from which the products of a group of 32 weights with activations are summed.
        Every lane is the correction for weights that are stored with an offset; or 0 in int16 lanes, whose
        sums get the correction when they have been widened.
        """
        if self.narrow:
            return splat(T.int16(0), 2 * self.isa.lanes)
        return splat(correction, self.isa.lanes)

    def step(self, total: Expr, weights: Expr, activations: Expr) -> Expr:
        """Returns `total`, a vector of sums, plus the products of one vector of weights (four consecutive k,
        the summed dimension, for each row) with the int32 `activations` that holds the four int8 activations
        of the same k. Where two int32 hold them as int16 (`parts`), a step multiplies one of the two, and
        `weights` holds the same two k.
        """
        lanes = self.isa.lanes
        both = (weights, splat(activations, lanes))
        if self.parts == 2:
            w, a = (T.reinterpret(typed("int16", 2 * lanes), operand) for operand in both)
            if self.way == "pmaddwd":
                kind = typed("int32", lanes)
                total += intrinsic(kind, _PAIRS_OF_WORDS[lanes], w, a)
                return T.call_extern(kind, "mlcbuild_in_order_32", total)
            # 255 * 127 fits an int16.
            return total + (w * a if self.way == "mul16" else self._pair_sums(w * a))
        w, a = (T.reinterpret(typed("int8", 4 * lanes), operand) for operand in both)
        if self.way == "pmaddubsw":
            kind = typed("int16", 2 * lanes)
            total += intrinsic(kind, _PAIRS_OF_BYTES[lanes], w, a)
            return T.call_extern(kind, "mlcbuild_in_order_16", total)
        return intrinsic(typed("int32", lanes), _QUADS_OF_BYTES[self.way, lanes], total, w, a)

    def widened(self, total: Expr) -> Expr:
        """Returns sums of products as an int32 vector with a lane for each row of weights. total: the vector
        in which they were summed, from `start` on."""
        lanes = self.isa.lanes
        if self.way == "pmaddubsw":
            ones = splat(T.int16(1), 2 * lanes)
            return intrinsic(typed("int32", lanes), _PAIRS_OF_WORDS[lanes], total, ones)
        return self._pair_sums(total) if self.narrow else total

    def _pair_sums(self, words: Expr) -> Expr:
        """Returns the sums of neighbouring int16 lanes of `words` as int32 lanes, half as many."""
        lanes = self.isa.lanes
        pairs = T.bind(T.reinterpret(typed("int32", lanes), words))
        return ((pairs << i32(16, lanes)) >> i32(16, lanes)) + (pairs >> i32(16, lanes))
