"""Loops that cores share: which core does what, and what waits for what."""

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
"""LLVM's own text, since no intrinsic counts for several threads: the number before."""
FIXED = 75
"""Percent of a loop whose core is known beforehand."""
_AWAY = 8
"""int64 values between a counter and what else lies in memory there: a cache line."""


def one_launch() -> AbstractContextManager[None]:
    """The parallel loops inside are started on all cores together. A core goes on to the next loop when its
    share of one is done, so a loop that others read from has to come `before_others`."""
    return cast(AbstractContextManager[None], T.attr(T.int32(0), "pragma_parallel_launch_point", T.int32(1)))


def before_others() -> AbstractContextManager[None]:
    """Of a parallel loop in `one_launch`: no core goes on before all are done."""
    key = "pragma_parallel_barrier_when_finish"
    return cast(AbstractContextManager[None], T.attr(T.int32(0), key, T.int32(1)))


def counter() -> Buffer:
    """What the cores that share one loop count with; made before they are started."""
    made = T.alloc_buffer((2 * _AWAY + 1,), "int64")
    T.buffer_store(made, i64(0), [_AWAY])
    return made


def shared(count: Expr, counter: Buffer, emit: Callable[[Expr], None], fixed: Expr | None = None) -> None:
    """`emit` for each of 0 .. count - 1 on all cores, in `one_launch`. `fixed` percent have their core
    beforehand, and one core has neighbours, as what is fetched ahead wants it. The rest is taken by whoever
    comes first: a core that is slower, or has other things to do, gets less of it, and the others need not
    wait for it. To take everything so is up to a fifth slower where memory is what limits."""

    def take() -> Expr:
        return start + T.call_extern("int64", "mlcbuild_take", T.address_of(counter[_AWAY]))

    start = T.bind(count * (i64(FIXED) if fixed is None else fixed) // 100)
    imported = T.attr(T.int32(0), "pragma_import_llvm", _TAKE)
    # Both in one loop, so that what is emitted is compiled once.
    with imported, T.serial(0, i64(2)) as turn:
        stop = T.bind(T.Select(turn == 0, start, count))
        with T.parallel(0, stop - turn * start) as index:
            number = register(index, 1, "int64")
            with T.If(turn == 1), T.Then():
                # For the first number a core takes all that it gets; after it nothing is left.
                number.set(take())
            with T.While(number.value < stop):
                emit(T.bind(number.value))
                number.set(stop)
                with T.If(turn == 1), T.Then():
                    number.set(take())
