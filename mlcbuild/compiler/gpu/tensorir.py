"""Emits the building blocks of GPU kernels in TensorIR: explicit threads, buffers, barriers.

The functions avoid traps of TVM 0.27: shared memory must be allocated inside the launch, or it becomes a
storage buffer; the body of a condition may hold one statement that touches shared memory, but no loop that
does, so `in_workgroups` takes its place; constants are printed with 7 digits, so `exact` passes them as bits;
only scalars may be passed to helper functions that are added to a kernel's source text (shader_text.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mlcbuild_format.program import Expression
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc, Shuffle, Var

Value = Any
"""Type alias for a TensorIR expression or buffer. TVM publishes no types for them, so type checkers accept
any value."""
WORKGROUP = 64
"""Number of threads in a workgroup of most kernels: two warps of NVIDIA's, one wave of AMD's."""
ITEM_BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2}
LOWEST = -1e30
"""Finite number (-1e30) that stands for minus infinity in softmax, because WGSL has no literal for it."""


@dataclass
class KernelBuilder:
    """A GPU kernel under construction. Its methods declare arguments and emit the launch; `function` is set
    when construction ends.
    """

    name: str
    buffers: dict[str, Expression] = field(default_factory=dict)
    """Name of a buffer -> its size in bytes, as an expression of the kernel's scalars."""
    scalars: list[str] = field(default_factory=list)
    threads: int = 0
    shared_bytes: int = 0
    grid: tuple[Expression, Expression] = (1, 1)
    function: PrimFunc | None = None
    features: frozenset[str] = frozenset()
    """Names of the optional GPU device features that the kernel may use, such as subgroups."""
    optional: set[str] = field(default_factory=set)
    """Names of the optional GPU device features, such as subgroups, that the kernel's code checked for while
    it was built. With such a feature the kernel has another source text, and the program may hold one text
    for each set of features."""
    _sizes: dict[str, Var] = field(default_factory=dict)
    _suffix: str = ""

    def uses(self, feature: str) -> bool:
        """Returns True if the kernel under construction may use the optional GPU device feature `feature`,
        such as subgroups. In either case the name is added to the set `optional`, which records for which
        features it is worth building the kernel once more."""
        self.optional.add(feature)
        return feature in self.features

    def size(self, name: str) -> Var:
        """Declares an int32 scalar argument `name` of the kernel that is a dimension of its buffers, unless
        it is declared already, and returns its variable.
        """
        if name not in self._sizes:
            self._sizes[name] = Var(name, "int32")
            self.scalars.append(name)
        return self._sizes[name]

    def scalar(self, name: str) -> Value:
        """Declares an int32 scalar argument of the kernel, and returns its variable. name: its name, by which
        a launch passes the value. Sizes of buffers are declared by the method `size` instead.
        """
        self.scalars.append(name)
        self._sizes[name] = T.arg(name, T.int32())
        return self._sizes[name]

    def buffer(self, name: str, shape: Sequence[int | Var], dtype: str = "float32") -> Value:
        """Declares and returns a storage buffer of the kernel, an argument `name` of the given shape. dtype:
        type of one element, float32, int32, uint32 or float16, or a vector of several, such as float32x4."""
        name += self._suffix
        buffer = T.match_buffer(T.arg(f"{name}_h", T.handle()), tuple(shape), dtype)
        IRBuilder.name(name, buffer)
        item, _, lanes = dtype.partition("x")
        size: Expression = ITEM_BYTES[item] * int(lanes or 1)
        for extent in shape:
            size = product(size, extent if isinstance(extent, int) else str(extent.name))
        self.buffers[name] = size
        return buffer

    @contextmanager
    def suffixed(self, suffix: str) -> Iterator[None]:
        """Adds `suffix` to the names of all buffers that are declared inside a `with` block, as a context
        manager: a kernel with two matrix products declares the buffers of the second one, such as w2 and y2,
        by the same functions as those of the first."""
        self._suffix = suffix
        try:
            yield
        finally:
            self._suffix = ""

    @contextmanager
    def launch(self, threads: int, x: Expression, y: Expression = 1) -> Iterator[tuple[Value, Value, Value]]:
        """Begins the kernel's body, as a context manager: a grid of `x` times `y` workgroups, expressions
        over the kernel's scalars, of `threads` threads each. It yields (index of the workgroup in x, in y,
        index of the thread in the workgroup).
        """
        self.threads, self.grid = threads, (x, y)
        with (
            T.launch_thread("blockIdx.y", self._extent(y)) as block_y,
            T.launch_thread("blockIdx.x", self._extent(x)) as block_x,
            T.launch_thread("threadIdx.x", tirx.const(threads, "int32")) as thread,
        ):
            yield block_x, block_y, thread

    def _extent(self, expression: Expression) -> Value:
        if isinstance(expression, int):
            return tirx.const(expression, "int32")
        if isinstance(expression, str):
            return self.size(expression)
        name, left, right = expression
        a, b = self._extent(left), self._extent(right)
        if name == "div":
            return tirx.floordiv(a + b - 1, b)
        return {"add": a + b, "mul": a * b, "min": tirx.min(a, b), "max": tirx.max(a, b)}[name]

    def shared(self, count: int, dtype: str = "float32") -> Value:
        """Emits the allocation of an array of `count` elements in shared memory, which all threads of a
        workgroup access, and returns its TensorIR buffer. It must be called inside the context manager
        `launch`, which begins the kernel's body; elsewhere the array would become a storage buffer."""
        self.shared_bytes += count * ITEM_BYTES[dtype]
        return T.alloc_buffer((count,), dtype, scope="shared")


_features: ContextVar[frozenset[str]] = ContextVar("features", default=frozenset())


@contextmanager
def for_features(features: frozenset[str]) -> Iterator[None]:
    """Allows GPU kernels that are built inside a `with` block to use the optional device features `features`,
    a set of names such as subgroups; outside of such a block kernels use none. It is a context manager; in
    nested blocks only the innermost counts."""
    token = _features.set(features)
    try:
        yield
    finally:
        _features.reset(token)


@contextmanager
def kernel(name: str) -> Iterator[KernelBuilder]:
    """Begins a GPU kernel, as a context manager that yields its KernelBuilder. When the `with` block ends,
    the builder's `function` is set.
    """
    builder = KernelBuilder(name, features=_features.get())
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        attributes = {"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": name}
        T.func_attr(attributes)
        yield builder
    builder.function = ir.get()


def product(left: Expression, right: Expression) -> Expression:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return ("mul", left, right)


def local(count: int, dtype: str = "float32") -> Value:
    """Emits the allocation of an array of `count` elements in each thread's registers, and returns it."""
    return T.alloc_buffer((count,), dtype, scope="local")


def put(buffer: Value, value: Value, *index: Value) -> None:
    T.buffer_store(buffer, value, list(index))


def barrier() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))


def bind(value: Value) -> Value:
    return T.bind(value)


@contextmanager
def when(condition: Value) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


@contextmanager
def in_workgroups(condition: Value) -> Iterator[None]:
    """Restricts the code that is emitted inside a `with` block to the workgroups for which `condition` holds,
    as a context manager. All threads of a workgroup must agree on the condition, so it may depend on the
    workgroup's indices but not on the thread's. Unlike the body of `when` the code may use shared memory and
    barriers: it is emitted as a loop that runs once or never, since TVM allows no barriers in conditions."""
    with T.serial(T.Cast("int32", condition)):
        yield


def lane(vector: Value, index: int) -> Value:
    return Shuffle([vector], [index])


def number(value: float) -> Value:
    """Returns a float32 constant for a value that seven printed digits represent exactly, such as 0 or 1."""
    return T.float32(value)


def exact(value: float) -> Value:
    """Returns a float32 constant for any value, rounded to float32. It is emitted by its bits, because TVM
    prints 7 digits."""
    return T.reinterpret("float32", T.uint32(struct.unpack("<I", struct.pack("<f", value))[0]))


def unsigned(value: Value) -> Value:
    return T.Cast("uint32", value)


def floating(value: Value) -> Value:
    return T.Cast("float32", value)


def half(word: Value, upper: Value | bool) -> Value:
    """Returns one of the two float16 numbers in a uint32 as float32. upper: condition that is true for the
    number in the high bits, an expression or a Python bool; a bool needs no instruction."""
    if isinstance(upper, bool):
        return T.call_pure_extern("float32", "half_hi" if upper else "half_lo", word)
    return T.Select(upper, half(word, True), half(word, False))


def pack_halves(first: Value, second: Value) -> Value:
    """Returns a uint32 with two float32 numbers rounded to float16, the first in the low bits. Both must be
    in the range of float16, since the result is undefined otherwise."""
    return T.call_pure_extern("uint32", "pack_halves", first, second)


def either(condition: Value, value: Value, other: Value) -> Value:
    """Returns the float32 `value` if the condition holds, else `other`, as an expression that computes both
    and then selects one, so a NaN in the one not selected has no effect. TVM writes a Select as a branch, and
    SwiftShader took minutes to compile the 16 branches of a prompt's attention."""
    return T.call_pure_extern("float32", "either", condition, value, other)


def strided(count: int, thread: Value, threads: int, body: Callable[[Value], None]) -> None:
    """Emits a loop over the indices 0 .. count - 1, divided among the threads of a workgroup. thread: index
    of the running thread; threads: their number; body: emits the loop's body for an index, inside a condition
    if `count` is no multiple of `threads`."""
    with T.serial(-(-count // threads)) as index:
        place = bind(index * threads + thread)
        if count % threads:
            with when(place < count):
                body(place)
        else:
            body(place)


def covering(count: int, thread: Value, threads: int, body: Callable[[Value], None]) -> None:
    """Emits a loop over the indices 0 .. count - 1, divided among the threads of a workgroup, without
    conditions, which TVM does not allow around loops over shared memory. Some threads repeat the last index,
    so `body`, which emits the loop's body for an index, must give the same result each time. thread: index of
    the running thread; threads: their number."""
    with T.serial(-(-count // threads)) as index:
        body(bind(T.min(index * threads + thread, count - 1)))
