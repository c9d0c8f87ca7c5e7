"""What this machine can do: kernels of ours that only read memory, or only multiply and add in registers.

As a program (argv: threads) it answers each line on stdin with the rates, measured anew. The number of
threads is TVM_NUM_THREADS, set before TVM is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":
    os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"] = sys.argv[1], "0"

import numpy as np
import tvm
from mlcbuild_runtime.devices import machine
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.cpu.isa import ISA, isa_for, tvm_target
from mlcbuild.compiler.cpu.kernels import dot
from mlcbuild.compiler.cpu.kernels.vectors import (
    argument,
    f32,
    fma,
    i32,
    i64,
    prefetch,
    prim_func,
    register,
    span,
    typed,
)
from mlcbuild.targets import target as targets

READ = 256 << 20
"""Bytes read in all: far more than a last cache holds."""
LOOPS, CHAINS = 1 << 19, 12


def reads(isa: ISA, words: int, parts: int) -> tvm.tirx.PrimFunc:
    """Sum `words` int32, in as many parts as there are threads."""
    step = 4 * isa.lanes
    each = words // parts

    def body() -> None:
        data, out = argument("data", (words,), "int32"), argument("out", (parts, step), "int32")
        with T.sblock("reads"), T.parallel(i64(parts)) as part:
            sums = [register(i32(0, isa.lanes), isa.lanes, "int32") for _ in range(4)]
            with T.serial(0, i64(each // step)) as i:
                place = part * each + i * step
                for line in range(-(-step // 16)):
                    prefetch(data, (place + 16 * line + 1024,))
                for v, total in enumerate(sums):
                    total.set(total.value + data[span(place + v * isa.lanes, isa.lanes)])
            for v, total in enumerate(sums):
                T.buffer_store(out, total.value, [part, span(v * isa.lanes, isa.lanes)])

    return prim_func("reads", body)


def products(isa: ISA, parts: int) -> tvm.tirx.PrimFunc:
    """LOOPS times CHAINS multiply-adds of float32 vectors in each part."""

    def body() -> None:
        out = argument("out", (parts, CHAINS * isa.lanes), "float32")
        with T.sblock("products"), T.parallel(i64(parts)) as part:
            factor = T.bind(out[part, span(0, isa.lanes)])
            sums = [register(f32(c, isa.lanes), isa.lanes) for c in range(CHAINS)]
            with T.serial(0, i64(LOOPS)):
                for total in sums:
                    total.set(fma(total.value, factor, factor, isa.lanes))
            for c, total in enumerate(sums):
                T.buffer_store(out, total.value, [part, span(c * isa.lanes, isa.lanes)])

    return prim_func("products", body)


def dots(isa: ISA, parts: int) -> tvm.tirx.PrimFunc:
    """LOOPS times CHAINS int8 dot products of four in each part, as the int8 kernels do them."""
    form = dot.Products(isa, 4)
    kind, count = ("int16", 2 * isa.lanes) if form.narrow else ("int32", isa.lanes)

    def body() -> None:
        out = argument("out", (parts, CHAINS * count), kind)
        seed = argument("seed", (parts, isa.lanes + 1), "int32")
        with T.sblock("dots"), T.parallel(i64(parts)) as part:
            weights = T.bind(seed[part, span(0, isa.lanes)])
            activations = T.bind(seed[part, isa.lanes])
            zero = T.Cast(typed(kind, count), i32(0, count))
            sums = [register(zero, count, kind) for _ in range(CHAINS)]
            with T.serial(0, i64(LOOPS)):
                for total in sums:
                    total.set(form.step(total.value, weights, activations))
            for c, total in enumerate(sums):
                T.buffer_store(out, total.value, [part, span(c * count, count)])

    return prim_func("dots", body)


def tiles(parts: int) -> tvm.tirx.PrimFunc:
    """LOOPS products of two AMX tiles of bfloat16 in each part: 16 rows, 16 columns, 32 values of k."""

    def emit(name: str, *arguments: tvm.tirx.Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))

    def body() -> None:
        shapes = argument("shapes", (16,), "int32")
        with T.sblock("tiles"), T.parallel(i64(parts)):
            emit("ldtilecfg", T.address_of(shapes[0]))
            for number in range(8):
                emit("tilezero", T.int8(number))
            with T.serial(0, i64(LOOPS // 4)):
                for number in range(4):
                    emit("tdpbf16ps", T.int8(number), T.int8(4 + number // 2), T.int8(6 + number % 2))
            emit("tilerelease")

    return prim_func("tiles", body)


def measure(isa: ISA, parts: int, compiled: Callable[[str], Callable[..., None]]) -> dict[str, float]:
    """Best of three: GB/s read, float32 GFlop/s, Gop/s of what multiplies quantized weights: int8, or tiles
    (a product and a sum are two)."""
    words = READ // 4
    data = tvm.runtime.tensor(np.ones(words, np.int32))
    sums = tvm.runtime.tensor(np.zeros((parts, 4 * isa.lanes), np.int32))
    floats = tvm.runtime.tensor(np.zeros((parts, CHAINS * isa.lanes), np.float32))
    form = dot.Products(isa, 4)
    count = CHAINS * isa.lanes * (2 if form.narrow else 1)
    ints = tvm.runtime.tensor(np.zeros((parts, count), np.int16 if form.narrow else np.int32))
    seed = tvm.runtime.tensor(np.zeros((parts, isa.lanes + 1), np.int32))
    work = parts * LOOPS * CHAINS * isa.lanes
    int8 = 2 * work * 4 / form.parts / _best(lambda: compiled("dots")(ints, seed)) / 1e9
    if isa.amx:
        shapes = np.array([1, *[0] * 3, *[0x400040] * 4, *[0] * 4, *[0x10101010] * 2, 0, 0], np.int32)
        given = tvm.runtime.tensor(shapes)
        int8 = max(int8, 2 * parts * LOOPS * 16 * 16 * 32 / _best(lambda: compiled("tiles")(given)) / 1e9)
    return {
        "read": READ / _best(lambda: compiled("reads")(data, sums)) / 1e9,
        "float32": 2 * work / _best(lambda: compiled("products")(floats)) / 1e9,
        "int8": int8,
    }


def _best(run: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return min(once() for _ in range(3))


def main() -> None:
    parts = int(sys.argv[1])
    target = targets.resolve("host")
    isa = isa_for(target)
    functions = {"reads": reads(isa, READ // 4, parts), "products": products(isa, parts)}
    functions["dots"] = dots(isa, parts)
    if isa.amx:
        machine.allow_tiles()
        functions["tiles"] = tiles(parts)
    library = tvm.compile(tvm.IRModule(functions), target=tvm_target(target))
    print(json.dumps({"isa": isa.name}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure(isa, parts, lambda name: library.mod[name])), flush=True)


if __name__ == "__main__":
    main()
