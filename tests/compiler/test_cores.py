"""Tests of parallel loops in kernels, whose iterations are shared among cores."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import tvm
from mlcbuild_runtime.devices import gpu_inputs, thread_count
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.cpu.kernels import int8_product
from mlcbuild.compiler.cpu.kernels.cores import FIXED, counter, one_launch, shared
from mlcbuild.compiler.cpu.kernels.vectors import argument, i64, prim_func
from mlcbuild.compiler.gpu.kernels import prompt_attention
from tests import kernelbench


def test_the_runtime_counts_on_what_kernels_do() -> None:
    """Checks that constants of the runtime equal those of the kernels. The runtime imports nothing from the
    compiler, so both define them."""
    assert max(int8_product.FEW_FIXED, FIXED) / 100 == thread_count.STATIC
    assert gpu_inputs.QUERY_TILE == prompt_attention.QUERIES


def test_every_number_is_done_once() -> None:
    """Checks that a kernel with several parallel loops, which runs repeatedly, executes each iteration
    exactly once, whatever part of the iterations is assigned statically."""
    kernelbench.need(kernelbench.TARGETS["portable"])
    percents = (0, 75, 92, 100)

    def body() -> None:
        count = T.int64()
        outs = [argument(f"out{percent}", (count,), "int64") for percent in percents]
        with T.sblock("all"):
            T.reads()
            T.writes()
            counters = [counter() for _ in percents]
            with one_launch():
                for percent, out, free_counter in zip(percents, outs, counters, strict=True):
                    shared(
                        count,
                        free_counter,
                        lambda i, out=out: T.buffer_store(out, out[i] + i + 1, [i]),  # type: ignore[misc]
                        i64(percent),
                    )

    created = kernelbench.compiled(kernelbench.TARGETS["portable"], [prim_func("numbers", body)]).library[
        "numbers"
    ]
    for count in (1, 2, 3, 4, 5, 7, 64, 1000, 4099):
        results = [tvm.runtime.tensor(np.zeros(count, np.int64)) for _ in percents]
        for _ in range(3):
            created(*results)
        for out in results:
            np.testing.assert_array_equal(out.numpy(), 3 * np.arange(1, count + 1))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="this machine has one core: none can wait for another")
def test_nobody_waits_for_a_core_that_has_other_things_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that no core waits for a busy one: the core that executes iteration 47 of 64 sleeps, and other
    cores execute the whole last quarter, which is assigned dynamically."""
    kernelbench.need(kernelbench.TARGETS["portable"])

    def body() -> None:
        out = argument("out", (64,), "uint64")

        def emit(index: tvm.tirx.Expr) -> None:
            with T.If(index == 47), T.Then():
                T.evaluate(T.call_extern("int32", "usleep", T.uint32(200_000)))
            T.buffer_store(out, T.call_extern("uint64", "pthread_self"), [index])

        with T.sblock("all"):
            T.reads()
            T.writes()
            free_counter = counter()
            with one_launch():
                shared(i64(64), free_counter, emit)

    created = kernelbench.compiled(kernelbench.TARGETS["portable"], [prim_func("sleeper", body)]).library[
        "sleeper"
    ]
    out = tvm.runtime.tensor(np.zeros(64, np.uint64))
    # TVM creates a pool for each thread that calls a kernel; this variable sets its size at that moment.
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    caller = threading.Thread(target=created, args=(out,))
    caller.start()
    caller.join()
    cores = out.numpy()
    assert len(set(cores.tolist())) == 2
    assert cores[47] not in cores[48:]
