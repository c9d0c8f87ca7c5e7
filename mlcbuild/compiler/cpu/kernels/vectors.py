"""Emits the building blocks of CPU kernels with TVM's IRBuilder: vectors, registers and reductions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc, Shuffle

from mlcbuild.compiler.cpu.isa import ISA

UNSIMPLIFIED = "mlcbuild.unsimplified"
"""Name of the attribute that is 1 for a kernel whose statements TVM must not simplify, and 0 for others; see
`lowering.KERNELS`.
"""


def prim_func(name: str, body: Callable[[], None], *, simplified: bool = True) -> PrimFunc:
    """Returns a finished TensorIR kernel. body: function without parameters that declares the kernel's
    arguments and emits its statements; simplified: False if TVM must not simplify the statements.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, UNSIMPLIFIED: int(not simplified)})
            body()
        return builder.get()


def argument(name: str, shape: Sequence[Expr | int], dtype: str, align: int = -1) -> Buffer:
    """Declares the next argument of the kernel under construction, a dense row-major tensor, and returns its
    buffer. align: the multiple of bytes at which its data start; -1 means 64.
    """
    return T.match_buffer(T.arg(name, T.handle()), tuple(shape), dtype, align=align)


def typed(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def span(start: Expr | int, lanes: int) -> Expr:
    """Returns the index expression (a TensorIR ramp) that selects `lanes` consecutive elements from `start`
    on.
    """
    return start if lanes == 1 else T.ramp(start, 1, lanes)


def splat(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else T.broadcast(value, lanes)


def f32(value: float, lanes: int = 1) -> Expr:
    return splat(T.float32(value), lanes)


def i32(value: int, lanes: int = 1) -> Expr:
    """Returns an int32 constant in every lane of a vector; values from 2**31 on stand for their two's
    complement.
    """
    return splat(T.int32(value - (1 << 32) if value >= 1 << 31 else value), lanes)


def i64(value: int) -> Expr:
    return T.int64(value)


def intrinsic(dtype: str, name: str, *arguments: Expr) -> Expr:
    """Returns a call of the LLVM intrinsic `name`, which must have no side effects. dtype: type of the
    result."""
    return T.call_llvm_pure_intrin(dtype, name, *arguments)


def fma(a: Expr, b: Expr, c: Expr, lanes: int) -> Expr:
    """Returns a * b + c for float32 vectors, fused where the processor can; never a library call."""
    return intrinsic(typed("float32", lanes), "llvm.fmuladd", a, b, c)


@dataclass(frozen=True)
class Register:
    """A variable that lives in one vector register: a small stack buffer that LLVM promotes."""

    buffer: Buffer
    lanes: int

    @property
    def value(self) -> Expr:
        return self.buffer[span(0, self.lanes)]

    def set(self, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [span(0, self.lanes)])


def register(value: Expr, lanes: int, dtype: str = "float32") -> Register:
    variable = Register(T.alloc_buffer((lanes,), dtype), lanes)
    variable.set(value)
    return variable


def opaque(value: Expr) -> Expr:
    """Emits an int64 value that TVM's passes do not look into, and returns its variable. They replace other
    variables by their values in every index that uses them, and then simplify the index, which took 0.3 of
    1.3 CPU s for three products of AMX. LLVM keeps the value in a register.
    """
    return T.bind(register(value, 1, "int64").value)


def registers(rows: int, columns: int, lanes: int) -> list[list[Register]]:
    """Emits a tile of rows x columns accumulators, vectors of `lanes` float32 that are set to 0, and returns
    it as a list of its rows."""
    return [[register(f32(0, lanes), lanes) for _ in range(columns)] for _ in range(rows)]


def load_f32(isa: ISA, buffer: Buffer, indices: Sequence[Expr | int], lanes: int) -> Expr:
    """Emits a load of `lanes` consecutive float32, float16 or int8 elements, and returns them as float32.
    indices: those of the first element.

    Without a conversion instruction, the bits of a float16 are moved to a float32's position, and a
    multiplication corrects the exponent. This is exact for zeros, subnormal and normal numbers; infinities
    and NaN become finite numbers of 65536 and more.
    """
    value = buffer[(*indices[:-1], span(indices[-1], lanes))]
    if buffer.ty.dtype == "float32":
        return value
    if isa.half or buffer.ty.dtype == "int8":
        return T.Cast(typed("float32", lanes), value)
    bits = T.bind(T.Cast(typed("int32", lanes), T.reinterpret(typed("uint16", lanes), value)))
    sign = (bits & i32(0x8000, lanes)) << i32(16, lanes)
    size = T.reinterpret(typed("float32", lanes), (bits & i32(0x7FFF, lanes)) << i32(13, lanes))
    size = T.reinterpret(typed("int32", lanes), size * f32(2.0**112, lanes))
    return T.reinterpret(typed("float32", lanes), size | sign)


def prefetch(buffer: Buffer, indices: Sequence[Expr | int], locality: int = 3, write: bool = False) -> None:
    """Emits a prefetch of the cache line of one element, which may lie outside the buffer. indices: those of
    the element; locality: 3 fetches into all caches, 2 not into the first level; write: True prepares for a
    store.
    """
    arguments = (T.address_of(buffer[tuple(indices)]), T.int32(write), T.int32(locality), T.int32(1))
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", *arguments))


def shuffle(vectors: Sequence[Expr], indices: Sequence[int]) -> Expr:
    """Returns the vector of the elements with these indices in the concatenation of several vectors."""
    return Shuffle(list(vectors), [T.int32(index) for index in indices])


def repeat_each(vector: Expr, lanes: int, times: int) -> Expr:
    """Emits a vector of lanes * times elements in which every element of `vector` stands `times` times in a
    row, and returns it.
    """
    if lanes == 1:
        return splat(vector, times)
    return shuffle([vector] * times, [index for index in range(lanes) for _ in range(times)])


def lane_sums(vectors: Sequence[Expr], lanes: int, join: Callable[[Expr, Expr], Expr] = operator.add) -> Expr:
    """Returns one vector with a lane for each of `vectors`: lane i is the sum of all elements of vectors[i],
    or another reduction by the function `join`. `lanes`, the length of the vectors, and their number are
    powers of two. Halves of two vectors are combined in one operation, which takes fewer operations than one
    reduction per vector."""
    room = lanes
    current = list(vectors)
    parts = 1
    while len(current) > 1 or room > 1:
        pairs = [current[i : i + 2] for i in range(0, len(current), 2)]
        held = range(parts * len(pairs[0]))
        if room == 1:
            current = [T.bind(shuffle(pair, list(held))) for pair in pairs]
        else:
            half = room // 2
            low = [part * room + i for part in held for i in range(half)]
            high = [index + half for index in low]
            current = [T.bind(join(shuffle(pair, low), shuffle(pair, high))) for pair in pairs]
            room = half
        parts = len(held)
    return current[0]


def fetch_rows(buffer: Buffer, row: Expr, column: Expr, row_bytes: int) -> None:
    """Emits a prefetch for a loop that reads a matrix four rows at a time. It fetches the element four rows
    below the one that is read or, if four rows are longer than 16 KiB, the one 4 KiB further on in the same
    row, where the hardware prefetcher works. buffer: the matrix; row, column: indices of the element that is
    read; row_bytes: number of bytes of a row."""
    if 4 * row_bytes <= 16 << 10:
        prefetch(buffer, (row + 4, column))
    else:
        prefetch(buffer, (row, column + (4096 * buffer.shape[1] // row_bytes)))


def odd_lines(values: int) -> int:
    """Returns a row length, counted in 4-byte values: the smallest of at least `values` that is an odd number
    of 64-byte lines, so that rows do not compete for the same cache sets."""
    return (-(-values // 16) | 1) * 16


def moved(bits: Expr, shift: int, lanes: int) -> Expr:
    """Returns a vector of int32 lanes shifted right by `shift` bits, with copies of the sign bit, or left by
    -`shift` bits if it is negative.
    """
    if shift == 0:
        return bits
    return bits >> i32(shift, lanes) if shift > 0 else bits << i32(-shift, lanes)
