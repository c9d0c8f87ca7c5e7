"""Emits code that unpacks 4-, 5- and 8-bit weights to bfloat16 tiles for the products of amx.py, in a few
instructions for 32 weights.

A table maps a code to a float16, which is multiplied by its scale. The bits of the product, shifted into the
position of a bfloat16, represent 2**-112 of its value; 112 = 104 + 8, the exponents of the powers of two by
which x and the scales are multiplied. |x| must be below 2**24; beyond, numbers overflow. So would the float16
of a weight above 255, which published models do not have: a tile with a scale that allows one is unpacked
with float32, which takes longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.kernels.amx import LANES, X_EXPONENT, rounded
from mlcbuild.compiler.cpu.kernels.vectors import f32, i32, i64, intrinsic, moved, splat, typed

Packed = Callable[[Expr | int], Expr]
"""Function (index of a line) that loads a line of a group's codes: int32x16, with a lane for each column."""
_SCALE_EXPONENT = 8
_LARGEST = 254.0
"""Maximum magnitude of a weight that is unpacked with float16: times 2**8 and _CUT, it is below 65504 even
after both factors were rounded."""
_CUT = 1.0 + 0.7213 * (7 / 16) / 128
"""Factor of the scales that compensates a rounding error: weights are truncated from float16 to bfloat16,
which drops three bits and makes them too small by 0.25 % on average.
"""


def unpack(bits: int, packed: Packed, scales: Expr, store: Callable[[Expr | int, Expr], None]) -> None:
    """Emits the conversion of a group of 32 weights in 16 columns to a tile of bfloat16 times 2**-104; the
    left factor of the product is multiplied by 2**104 to cancel this. bits: those of a code. packed: loads
    the group's codes. scales: those of the columns, float16x16. store: function (row from 0 to 15, int32x16
    with two weights of each column) that emits the store of a row of the tile."""
    with T.If(_are_large(scales, bits)):
        with T.Then(), T.serial(0, i64(LANES)) as row:
            store(row, _wide(packed, scales, bits, row))
        with T.Else():
            pairs = _pair_scales(scales)
            lines = [T.bind(packed(i)) for i in range(bits)]
            for j in range(4):
                for byte in range(4):
                    store(4 * j + byte, _scaled(_levels(lines, bits, j, byte), pairs))


def _are_large(scales: Expr, bits: int) -> Expr:
    """Returns a condition that is true if one of the scales of 16 columns, passed as float16x16, allows
    weights of more than _LARGEST with codes of `bits` bits. It takes five instructions."""
    limit = int(np.float16(_LARGEST / 2 ** (bits - 1)).view(np.int16))
    sizes = T.reinterpret("int16x16", scales) & splat(T.int16(0x7FFF), LANES)
    signs = T.reinterpret("int8x32", splat(T.int16(limit), LANES) - sizes)
    return (intrinsic("int32", "llvm.x86.avx2.pmovmskb", signs) & i32(0xAAAAAAAA)) != 0


def _wide(packed: Packed, scales: Expr, bits: int, row: Expr) -> Expr:
    """Returns one row of an AMX weight tile, int32x16, as `_scaled` does, but computes it with float32, for
    weights of any magnitude. packed: loads the group's codes; scales: those of the 16 columns, float16x16;
    row: index of the tile's row, from 0 to 15."""
    line, start = T.truncdiv(row, i64(4)), T.Cast("int32", T.truncmod(row, i64(4)) * 8)
    factors = T.Cast(typed("float32", LANES), scales) * f32(2.0**-X_EXPONENT, LANES)

    def half(number: int) -> Expr:
        if bits == 8:
            codes = _field(packed(line + 4 * number), start, 8)
        else:
            codes = _field(packed(line), start + 4 * number, 4)
        if bits == 5:
            fifth = _field(packed(4), start + T.Cast("int32", line) + 4 * number, 1)
            codes = codes | (fifth << i32(4, LANES))
        return T.Cast(typed("float32", LANES), codes - i32(1 << (bits - 1), LANES)) * factors

    return rounded(T.bind(half(0)), T.bind(half(1)))


def _field(line: Expr, start: Expr, bits: int) -> Expr:
    """Returns int32x16, the `bits` bits of each lane of `line` from bit `start` on."""
    return (line >> splat(start, LANES)) & i32((1 << bits) - 1, LANES)


def _pair_scales(scales: Expr) -> Expr:
    """Returns the scales of 16 columns, passed as float16x16, as float16x32 with each scale twice, side by
    side. They are multiplied by 2**8 and by a correction for the bits that weights lose in bfloat16."""
    wide = T.Cast(typed("float32", LANES), scales) * f32(_CUT * 2**_SCALE_EXPONENT, LANES)
    bits = T.reinterpret(typed("int16", LANES), T.Cast(typed("float16", LANES), wide))
    lanes = T.bind(T.Cast(typed("int32", LANES), bits) & i32(0xFFFF, LANES))
    return T.bind(T.reinterpret("float16x32", lanes | (lanes << i32(16, LANES))))


def _levels(lines: Sequence[Expr], bits: int, j: int, byte: int) -> Expr:
    """Returns one row of an AMX weight tile for 16 columns of results, a float16x32 with two weights of each
    column: its codes with the indices 4 * j + byte and 16 + 4 * j + byte in a group of 32, minus 2**(bits -
    1). j, byte: integers from 0 to 3. lines: the group's codes as int32x16 vectors, one lane for each column:
    4 vectors for codes of 4 bits, 8 for 8 bits, 5 for 5 bits, where the last has the fifth bits.
    """
    if bits == 8:
        return _bytes(lines[j], lines[4 + j], byte)
    fields = _fields(lines[j], 8 * byte)
    count = 2**bits
    if bits == 5:
        fifth = _fields(lines[4], 8 * byte + j - 4)
        fields = (fields & splat(T.int8(0x0F), 64)) | (fifth & splat(T.int8(0x10), 64))
    # The instruction uses only the low five bits of an index, so a table of 16 levels holds them twice.
    values = T.Cast("float16x32", (T.ramp(T.int32(0), 1, 32) & i32(count - 1, 32)) - i32(count // 2, 32))
    both = (T.reinterpret("int16x32", operand) for operand in (values, fields))
    return T.reinterpret("float16x32", intrinsic("int16x32", "llvm.x86.avx512.permvar.hi.512", *both))


def _fields(packed: Expr, start: int) -> Expr:
    """Returns int8x64, four bytes for each int32 lane of `packed`: the eight bits from bit `start` on, twice,
    then the eight bits from bit start + 4 on, twice. Bits below 0 or above 31 are those of the other lane in
    the same 64 bits; callers ignore them."""
    starts = [(32 * lane + start + 4 * half) % 64 for lane in (0, 1) for half in (0, 0, 1, 1)]
    control = splat(T.int64(int.from_bytes(bytes(starts), "little")), 8)
    operands = (T.reinterpret("int8x64", operand) for operand in (control, packed))
    return intrinsic("int8x64", "llvm.x86.avx512.pmultishift.qb.512", *operands)


def _bytes(low: Expr, high: Expr, byte: int) -> Expr:
    lower, upper = moved(low, 8 * byte, LANES), moved(high, 8 * byte - 16, LANES)
    pairs = (lower & i32(0xFF, LANES)) | (upper & i32(0xFF0000, LANES))
    return T.Cast("float16x32", T.reinterpret("int16x32", pairs) - splat(T.int16(128), 32))


def _scaled(levels: Expr, scales: Expr) -> Expr:
    """Returns one row of an AMX weight tile, int32x16: each lane holds two bfloat16 weights times 2**-104;
    the left factor of the product is multiplied by 2**104 to cancel this. levels: the signed codes of 16
    columns, which are the stored codes minus 2**(bits - 1), float16x32; scales: float16x32, each column's
    scale twice, multiplied by 2**8 and by a correction for the bits that are cut off.
    """
    bits = T.reinterpret("int16x32", levels * scales)
    cut = (bits >> splat(T.int16(3), 32)) & splat(T.int16(0x8FFF - 0x10000), 32)
    return T.reinterpret(typed("int32", LANES), cut)
