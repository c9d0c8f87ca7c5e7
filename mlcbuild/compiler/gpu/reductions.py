"""Emits sums and maxima over the threads of a workgroup: through shared memory, and on devices with subgroups
first among the threads of a subgroup, which needs no barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from mlcbuild_format.program import SUBGROUPS
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.tensorir import KernelBuilder, Value, barrier, bind, local, put, when

Operation: TypeAlias = Literal["add", "max"]
_COMBINE: Mapping[Operation, Callable[[Value, Value], Value]] = {
    "add": lambda left, right: left + right,
    "max": T.max,
}


def reduced(
    k: KernelBuilder, values: Sequence[Value], scratch: Sequence[Value], at: tuple[Value, int], how: Operation
) -> list[Value]:
    """Emits the sum ("add") or maximum ("max"), as `how` chooses, of each of several values over every run of
    consecutive threads in a workgroup, and returns the results, which all threads of a run have. values: one
    float32 number of each thread; scratch: an array in shared memory for each value, with one number per
    thread; at: (index of the thread, number of threads in a run, a power of two). Before `scratch` is written
    again, the kernel needs a barrier."""
    thread, count = at
    if count == 1:
        return [bind(value) for value in values]
    if k.uses(SUBGROUPS):
        return _by_subgroups(values, scratch, at, how)
    for buffer, value in zip(scratch, values, strict=True):
        put(buffer, value, thread)
    barrier()
    step = count // 2
    while step:
        for buffer in scratch:
            with when(thread % count < step):
                put(buffer, _COMBINE[how](buffer[thread], buffer[thread + step]), thread)
        barrier()
        step //= 2
    return [bind(buffer[thread // count * count]) for buffer in scratch]


def _by_subgroups(
    values: Sequence[Value], scratch: Sequence[Value], at: tuple[Value, int], how: Operation
) -> list[Value]:
    """Emits the sum ("add") or maximum ("max"), as `how` chooses, of each of several values over runs of
    consecutive threads, on devices with subgroups of any size, and returns the results, which all threads of
    a run have. Threads first exchange values within their subgroup; if a run has several subgroups, their
    results are then combined through shared memory.

    values: one float32 number of each thread; scratch: an array in shared memory for each value, with one
    number per thread; at: (index of the thread, number of threads in a run, a power of two). Before `scratch`
    is written again, the kernel needs a barrier."""
    thread, count = at
    for buffer, value in zip(scratch, values, strict=True):
        exchanged, step = value, 1
        while step < count:
            exchanged = bind(T.call_extern("float32", f"lanes_{how}", exchanged, T.uint32(step)))
            step *= 2
        put(buffer, exchanged, thread)
    barrier()
    parts, stride = (
        bind(T.call_extern("int32", name, T.uint32(count))) for name in ("lane_runs", "lane_stride")
    )
    first, results = bind(thread // count * count), local(len(scratch))
    for index, buffer in enumerate(scratch):
        put(results, buffer[first], index)
    with T.serial(parts - 1) as part:
        place = bind(first + (part + 1) * stride)
        for index, buffer in enumerate(scratch):
            put(results, _COMBINE[how](results[index], buffer[place]), index)
    return [bind(results[index]) for index in range(len(scratch))]
