"""Emits float32 arithmetic on vectors of one length, and the loops that kernels without matrix products
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc, Var

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import vectors

Combine = Callable[[Expr, Expr], Expr]


NAME = "mlcbuild.name"
"""Name of the TensorIR attribute that holds a kernel's base name. Its name in a library is the base name,
with a number appended if several kernels have the same one.
"""


class Kernel:
    """A kernel under construction, as a TensorIR function. `func` is the finished function once the `kernel`
    context has ended.
    """

    func: PrimFunc

    def tensor(
        self, name: str, shape: Sequence[Expr | int], dtype: str = "float32", align: int = -1
    ) -> Buffer:
        """Declares the next argument of the kernel, a tensor of this shape, and returns its buffer. align:
        the multiple of bytes at which its data start; -1 means 64.
        """
        return vectors.argument(name, shape, dtype, align)

    def number(self, name: str) -> Var:
        """Declares the next argument of the kernel, an int64, and returns its variable."""
        return T.arg(name, T.int64())

    @contextmanager
    def body(self) -> Iterator[None]:
        """Returns the context manager inside which the body of the kernel is emitted, after all of its
        arguments are declared.
        """
        with T.sblock("root"):
            T.reads()
            T.writes()
            yield


@contextmanager
def kernel(name: str, *, simplified: bool = True) -> Iterator[Kernel]:
    """Returns a context manager that yields a Kernel, inside which one TensorIR function is built. Its loops
    are final: no later pass of TVM schedules it. name: the function's name, which need not be unique in a
    library; simplified: False if TVM must not simplify its statements.
    """
    attributes = {"tirx.noalias": True, "tirx.is_scheduled": True, vectors.UNSIMPLIFIED: int(not simplified)}
    building = Kernel()
    with IRBuilder() as builder:
        # Private, because a module may hold several kernels of one name for other types and renames them.
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({**attributes, NAME: name})
            yield building
        building.func = builder.get()


def size_var(name: str) -> Var:
    """Returns a TVM variable, int64, for a dimension of a tensor whose size is known only when the library
    runs. name: the variable's name.
    """
    return Var(name, "int64")


def over_rows(rows: Expr, serial_up_to: int, emit: Callable[[Expr], None]) -> None:
    """Emits a loop over rows 0 .. rows - 1, on all cores if there are more than `serial_up_to` rows. emit:
    function that emits the loop's body for a row, called twice: once for the loop on one core, once for the
    parallel one.

    Waking the other cores takes several microseconds, longer than a few rows of a light kernel.
    """
    with T.If(rows <= serial_up_to):
        with T.Then(), T.serial(rows) as row:
            emit(row)
        with T.Else(), T.parallel(rows) as row:
            emit(row)


def registers(count: int, lanes: int, dtype: str = "float32") -> list[Buffer]:
    """Emits `count` arrays of `lanes` values that live in registers, and returns their buffers. Their values
    are undefined. Each must take less than 1024 bytes, TVM's limit for the stack; a larger one would be
    allocated in memory.
    """
    return [T.alloc_buffer((lanes,), dtype) for _ in range(count)]


def scratch(shape: Sequence[int], dtype: str = "float32") -> Buffer:
    """Emits the allocation of a scratch array and returns its buffer. One of 1024 bytes or more comes from
    the workspace pool of the running thread, a smaller one lies on the stack. Its values are undefined.
    """
    return T.alloc_buffer(tuple(shape), dtype)


_LN2_HIGH = float(np.float32(0.693145751953125))  # 14 bits: products with integers up to 2^9 are exact
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_ROUND = 1.5 * 2.0**23


def _exp_polynomial(degree: int) -> list[float]:
    """Returns the degree + 1 coefficients, lowest power first, of a polynomial in r that approximates e^r for
    |r| <= ln(2)/2. The first two are exactly 1; the others interpolate e^r at Chebyshev nodes. The error at
    degree 6 is 2e-9.
    """
    half = math.log(2.0) / 2
    nodes = np.cos((np.arange(degree + 1) + 0.5) * np.pi / (degree + 1)) * half
    fitted: list[float] = np.polynomial.Polynomial.fit(nodes, np.exp(nodes), degree).convert().coef.tolist()
    return [1.0, 1.0, *fitted[2:]]


_EXP = _exp_polynomial(6)


@dataclass(frozen=True)
class Floats:
    """Emits operations on vectors of `lanes` float32 values with the instructions of `isa`. With one lane,
    operands are scalars.
    """

    isa: ISA
    lanes: int

    @staticmethod
    def dividing(isa: ISA, extent: int) -> Floats:
        """Returns a Floats, which emits operations on vectors, with the longest vectors, up to those of the
        instruction set, whose length divides `extent`, so that loops over `extent` values have no remainder.
        """
        return Floats(isa, math.gcd(extent, isa.lanes))

    @property
    def scalar(self) -> Floats:
        return Floats(self.isa, 1)

    def load(self, buffer: Buffer, *index: Expr | int) -> Expr:
        """Emits a load of `lanes` consecutive float32, float16 or int8 elements, and returns them as a
        float32 vector. index: that of the first element, one number per dimension.
        """
        return vectors.load_f32(self.isa, buffer, index, self.lanes)

    def store(self, buffer: Buffer, value: Expr, *index: Expr | int) -> None:
        """Emits a store of a vector in consecutive elements, rounded to float16 if the buffer has that type.
        index: that of the first element, one number per dimension.
        """
        if buffer.ty.dtype == "float16":
            value = self._half(value)
        T.buffer_store(buffer, value, [*index[:-1], vectors.span(index[-1], self.lanes)])

    def _half(self, value: Expr) -> Expr:
        """Emits the rounding of a float32 vector to float16, to nearest even, and returns the float16 vector.

        Where the instruction set has no instruction for it, it rounds the 13 excess bits with an integer
        addition, and lets the hardware's float addition round values that are subnormal in float16. Values
        that are too large become infinite.
        """
        if self.isa.half:
            return T.Cast(vectors.typed("float16", self.lanes), value)
        ints = vectors.typed("int32", self.lanes)
        bits = T.bind(T.reinterpret(ints, value))
        sign = T.shift_right(bits, self._int(16)) & self._int(0x8000)
        size = T.min(self.fabs(value), self.constant(65536.0))
        return self._half_bits(T.bind(size), sign, ints)

    def _half_bits(self, size: Expr, sign: Expr, ints: str) -> Expr:
        # Below 2^-14, adding 0.5 aligns float16's last subnormal bit with float32's last bit.
        tiny = T.reinterpret(ints, size + self.constant(0.5)) - self._int(0x3F000000)
        bits = T.bind(T.reinterpret(ints, size))
        odd = T.shift_right(bits, self._int(13)) & self._int(1)
        normal = T.shift_right(bits - self._int(0x38000000) + self._int(0xFFF) + odd, self._int(13))
        chosen = T.Select(size < self.constant(2.0**-14), tiny, normal) | sign
        narrow = T.Cast(vectors.typed("uint16", self.lanes), chosen)
        return T.reinterpret(vectors.typed("float16", self.lanes), narrow)

    def _int(self, value: int) -> Expr:
        return vectors.i32(value, self.lanes)

    def constant(self, value: float) -> Expr:
        return vectors.f32(float(np.float32(value)), self.lanes)

    def spread(self, value: Expr) -> Expr:
        """Returns a vector of float32 lanes with the scalar `value` in every lane."""
        return vectors.splat(value, self.lanes)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return vectors.fma(a, b, c, self.lanes)

    def fabs(self, x: Expr) -> Expr:
        return vectors.intrinsic(vectors.typed("float32", self.lanes), "llvm.fabs", x)

    def fold(self, value: Expr, combine: Combine) -> Expr:
        """Emits the reduction of a vector, whose number of lanes is a power of two, to a scalar with the
        function `combine` of two vectors, and returns the scalar. It halves the vector in registers, because
        LLVM would take halves apart that are read back from memory.
        """
        half = self.lanes // 2
        while half:
            value = T.bind(value)
            low, high = (vectors.shuffle([value], range(start, start + half)) for start in (0, half))
            value = combine(low, high)
            half //= 2
        return T.bind(value)

    def opaque(self, x: Expr) -> Expr:
        """Emits a store of the vector x in a register and returns its reload, which costs nothing. It hides x
        from TVM's code generator, whose simplification of nested variables takes time that doubles with every
        step that uses a variable twice.
        """
        place = registers(1, self.lanes)[0]
        self.store(place, x, 0)
        return T.bind(self.load(place, 0))

    def exp(self, x: Expr) -> Expr:
        """Emits e^x for a vector and returns it, within 2 units in the last place; at least 1e-38, at most
        2e38, never infinite: x is limited to -87 .. 88.

        x = n ln 2 + r with ln 2 in two parts (Cody and Waite, 1980); a polynomial in r; then n is added to
        the bits of the exponent.
        """
        x = self.opaque(T.max(T.min(x, self.constant(88.0)), self.constant(-87.0)))
        dtype, ints = vectors.typed("float32", self.lanes), vectors.typed("int32", self.lanes)
        # Adding 1.5 * 2^23 leaves the nearest integer in the last bits of the sum.
        shifted = T.bind(self.fma(x, self.constant(1 / math.log(2.0)), self.constant(_ROUND)))
        n = T.bind(shifted - self.constant(_ROUND))
        r = T.bind(self.fma(n, self.constant(-_LN2_LOW), self.fma(n, self.constant(-_LN2_HIGH), x)))
        value = self.constant(_EXP[-1])
        for coefficient in reversed(_EXP[:-1]):
            value = self.fma(value, r, self.constant(coefficient))
        bits = T.reinterpret(ints, value) + T.shift_left(T.reinterpret(ints, shifted), self._int(23))
        return T.bind(T.reinterpret(dtype, bits))

    def sigmoid(self, x: Expr) -> Expr:
        return self.constant(1.0) / (self.constant(1.0) + self.exp(self.constant(0.0) - x))

    def tanh(self, x: Expr) -> Expr:
        """Returns tanh(x) = (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; absolute error 1e-7."""
        e = self.exp(self.constant(-2.0) * self.fabs(x))
        value = T.bind((self.constant(1.0) - e) / (self.constant(1.0) + e))
        return T.Select(x < self.constant(0.0), self.constant(0.0) - value, value)

    def soft_cap(self, x: Expr, cap: float) -> Expr:
        """Emits the soft cap cap * tanh(x / cap) of a float32 vector x and returns its value."""
        return self.constant(cap) * self.tanh(T.bind(x * self.constant(1 / cap)))

    def whole(self, value: Expr) -> Expr:
        """Converts a vector of int32 values from -2^22 to 2^22 - 1 to float32 and returns it; other values
        give wrong results. It adds the bits of 1.5 * 2^23 and subtracts that number, because TVM's range
        analysis fails for a direct cast."""
        bits = T.reinterpret(vectors.typed("float32", self.lanes), value + self._int(0x4B400000))
        return bits - self.constant(1.5 * 2.0**23)

    def rounded(self, value: Expr) -> Expr:
        """Returns float32 values rounded to those that bfloat16 can represent, ties to even."""
        ints = vectors.typed("int32", self.lanes)
        bits = T.bind(T.reinterpret(ints, value))
        odd = T.shift_right(bits, self._int(16)) & self._int(1)
        rounded = (bits + self._int(0x7FFF) + odd) & self._int(-0x10000)
        return T.bind(T.reinterpret(vectors.typed("float32", self.lanes), rounded))
