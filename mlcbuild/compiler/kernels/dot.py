"""Products of 4-bit weights with 8-bit activations, one group of 32 at a time, by any instruction.

A *quad* is four consecutive k. Weights of a quad are the four bytes (0 .. 15) of an int32 lane, one lane
for each row of a tile. Activations of a quad are one int32, or two where the instruction set has no byte
products: `parts` says how many. Sums over a group are exact; weights are 8 too large, which the group's
correction (-8 times the sum of its activations) puts right.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.kernels.isa import ISA
from mlcbuild.compiler.kernels.vectors import i32, intrinsic, splat, typed

QUADS = 8
"""Quads in a group of 32."""
_PAIR_SUMS = {8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")}
_PAIR_SUMS[16] = ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")


def parts(isa: ISA) -> int:
    """int32 values that hold the activations of one quad."""
    return 2 if isa.dot == "mul16" else 1


def narrow(isa: ISA) -> bool:
    """Whether a group is summed in twice as many int16 lanes instead of int32 lanes."""
    return isa.dot in ("pmaddubsw", "mul16")


def quads(isa: ISA, packed: Expr) -> tuple[list[Expr], list[Expr]]:
    """The operands in 4 * lanes bytes of the x16 layout: those of the low quad, those of the high quad."""
    mask = i32(0x000F000F if isa.dot == "mul16" else 0x0F0F0F0F, isa.lanes)
    shifts = range(0, 8 * parts(isa), 8)

    def operands(first: int) -> list[Expr]:
        amounts = [first + shift for shift in shifts]
        return [T.bind((packed >> i32(a, isa.lanes) if a else packed) & mask) for a in amounts]

    return operands(0), operands(4)


def start(isa: ISA, correction: Expr) -> Expr:
    """The accumulator at the start of a group. int16 lanes take the correction at the end: they hold the
    sums of a whole group (at most 16 * 15 * 127 = 30480), but not more."""
    if narrow(isa):
        return splat(T.int16(0), 2 * isa.lanes)
    return splat(correction, isa.lanes)


def step(isa: ISA, total: Expr, weights: Expr, activations: Expr) -> Expr:
    """total plus the products of one operand and the int32 of activations that belongs to it."""
    lanes = isa.lanes
    both = (weights, splat(activations, lanes))
    if isa.dot == "mul16":
        w, a = (T.reinterpret(typed("int16", 2 * lanes), operand) for operand in both)
        return total + w * a
    w, a = (T.reinterpret(typed("int8", 4 * lanes), operand) for operand in both)
    if isa.dot == "pmaddubsw":
        return total + intrinsic(typed("int16", 2 * lanes), _PAIR_SUMS[lanes][0], w, a)
    name = {"vpdpbusd": "llvm.x86.avx512.vpdpbusd.512", "sdot": "llvm.aarch64.neon.sdot"}[isa.dot]
    return intrinsic(typed("int32", lanes), name, total, w, a)


def finish(isa: ISA, total: Expr, correction: Expr) -> Expr:
    """The sums of a group as int32 lanes."""
    lanes = isa.lanes
    if isa.dot == "pmaddubsw":
        ones = splat(T.int16(1), 2 * lanes)
        wide = intrinsic(typed("int32", lanes), _PAIR_SUMS[lanes][1], total, ones)
        return wide + splat(correction, lanes)
    if isa.dot == "mul16":
        pairs = T.bind(T.reinterpret(typed("int32", lanes), total))
        low = (pairs << i32(16, lanes)) >> i32(16, lanes)
        return low + (pairs >> i32(16, lanes)) + splat(correction, lanes)
    return total
