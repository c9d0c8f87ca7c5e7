"""Emits parallel loops over the cores, with work sharing and barriers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.vectors import i64, register

_TAKE = """
define linkonce_odr i64 @mlcbuild_take(ptr %counter) alwaysinline nounwind {
  %taken = atomicrmw add ptr %counter, i64 1 monotonic
  ret i64 %taken
}
"""
"""LLVM code of a function that atomically adds 1 to an int64 counter and returns its old value. No LLVM
intrinsic does this.
"""
FIXED = 75
"""Percentage of a loop's iterations that are assigned to cores statically; each of the rest is executed by
whichever core is free. This dynamic part made prompts 5 to 8 % faster (`ci/bench/cpu`, two cores of Zen 4).
"""
_AWAY = 8
"""Number of int64 values before a shared counter, and after it, that fill its cache lines, against false
sharing.
"""


def one_launch() -> AbstractContextManager[None]:
    """Returns a context manager without a value: the parallel loops that are emitted inside it are launched
    on all cores together. A core starts the next loop as soon as it has finished its part of the current one,
    so a loop whose results other cores read must be emitted inside `before_others`, which adds a barrier.
    """
    return cast(AbstractContextManager[None], T.attr(T.int32(0), "pragma_parallel_launch_point", T.int32(1)))


def before_others() -> AbstractContextManager[None]:
    """Returns a context manager without a value. A parallel loop that is emitted inside it ends with a
    barrier of all cores, so that loops after it may read its results. It is used among loops that are
    launched on the cores together (inside `one_launch`); without a barrier, a core starts the next loop at
    once.
    """
    key = "pragma_parallel_barrier_when_finish"
    return cast(AbstractContextManager[None], T.attr(T.int32(0), key, T.int32(1)))


def counter() -> Buffer:
    """Emits a shared counter with the value zero, from which cores take the iterations of one parallel loop,
    and returns its int64 buffer, which is passed to the function `shared`; padding surrounds the counter. It
    must be created before the cores are launched.
    """
    values = T.alloc_buffer((2 * _AWAY + 1,), "int64")
    T.buffer_store(values, i64(0), [_AWAY])
    return values


def shared(count: Expr, counter: Buffer, emit: Callable[[Expr], None], fixed: Expr | None = None) -> None:
    """Emits a loop whose iterations are divided among all cores. It must be emitted inside the context of
    `one_launch`, which launches loops on all cores together. emit: function that emits the loop's body for an
    index from 0 to count - 1; counter: buffer from the function `counter`, for this loop only, from which
    cores take indices.

    `fixed` percent of the iterations (75 by default) are assigned statically, consecutive ones to one core,
    which hardware prefetching needs. The others are assigned dynamically, so that no core waits for a slower
    or interrupted one. Fully dynamic sharing is up to a fifth slower where memory bandwidth is the limit.
    """

    def take() -> Expr:
        return start + T.call_extern("int64", "mlcbuild_take", T.address_of(counter[_AWAY]))

    start = T.bind(count * (i64(FIXED) if fixed is None else fixed) // 100)
    imported = T.attr(T.int32(0), "pragma_import_llvm", _TAKE)
    # Static and dynamic parts share one loop, so that the emitted code is compiled once.
    with imported, T.serial(0, i64(2)) as turn:
        stop = T.bind(T.Select(turn == 0, start, count))
        with T.parallel(0, stop - turn * start) as index:
            number = register(index, 1, "int64")
            with T.If(turn == 1), T.Then():
                # In the static part a core gets its only number; afterwards nothing is left for it.
                number.set(take())
            with T.While(number.value < stop):
                emit(T.bind(number.value))
                number.set(stop)
                with T.If(turn == 1), T.Then():
                    number.set(take())
