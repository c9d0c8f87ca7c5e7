"""The limits of this machine: kernels that only read memory, or only multiply and add in registers.

As a program (argv: threads, target) it prints {"isa": name of the instruction set}, and then answers each
line on stdin with freshly measured rates, as JSON: {"read": GB/s of memory, "float32": GFlop/s, "int8":
Gop/s}. It sets TVM_NUM_THREADS to the number of threads before TVM is loaded.

What bounds each loop, by the tables of uops.info and Agner Fog (instructions per cycle and core):

    float32     fmadd: 2 on every x86 core here (Zen 4 splits 512 bits: 1), 2 to 4 on Arm
    vpdpbusd    512 bits: Zen 5: 2; Zen 4: 1; Intel servers since Ice Lake: 1 or 2, by model.
                256 bits (AVX-VNNI): 2 on Intel (ports 0 and 1) and on Zen 5
    pmaddubsw   2 of 256 bits (Zen 2 and 3: pipes 0 and 3; Intel: ports 0 and 1), each with one
                addition, which has ports to spare. 32 byte products twice a cycle at 3.5 GHz are
                448 Gop/s.
    sdot        2 (Neoverse N1) to 4 (Neoverse V1, Apple), of 128 bits
    smmla       2 (Neoverse N2) to 4 (Neoverse V1), with twice the products of sdot
    mul16       pmullw, on x86 without AVX2: 2 of 128 bits

A loop that gave all of its products the same operands would let the compiler compute one product
before the loop and time additions only. So the weights of each turn come from memory (first-level
cache), and every product of a turn has a pair of operands of its own. `tests/bench/test_limits.py`
counts the instructions of the timed loops.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

if __name__ == "__main__":
    os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"] = sys.argv[1], "0"

import numpy as np
import tvm
from mlcbuild_runtime.devices import machine
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Expr

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
    splat,
    typed,
)
from mlcbuild.targets import presets

READ = 256 << 20
"""Number of bytes in the array whose reading measures the memory bandwidth: far more than a last-level cache
holds.
"""
TURNS = 1 << 20
"""Number of iterations of the loops that measure compute speed. At two products per cycle they take about 4
ms, so that the time for starting threads is negligible.
"""
CHAINS = 12
"""Number of independent sums in the loop that measures the rate of float32 multiply-adds: their latency (4
cycles) times their throughput (2 per cycle), and a few more."""
WEIGHT_ROWS = 64
"""Number of rows of weights that the int8 loop reads repeatedly: at most 16 KiB, which stays in the
first-level cache.
"""


@dataclass(frozen=True)
class DotTile:
    """The shape of the register tile in the loop that measures the int8 rate: each vector of weights
    (`columns` of them) is multiplied with each int32 of four activations (`rows`).
    """

    rows: int
    columns: int

    @property
    def products(self) -> int:
        """Returns the number of vector products in one iteration of the loop that measures the int8 rate:
        rows times columns of its register tile. Each product is added to a sum of its own.
        """
        return self.rows * self.columns


def dot_tile(isa: ISA) -> DotTile:
    """Returns the register tile (rows of activations times columns of weights) of the int8 loop whose speed
    is measured. Its sums and operands fit the registers, and it has enough independent sums to hide the
    latency of instructions.

    vpdpbusd adds to its sum with a latency of 5 cycles, and two start in each cycle: at least ten sums.
    pmaddubsw and pmullw are followed by an addition of one cycle, so fewer sums do.
    """
    tiles = {"avx2": DotTile(4, 2), "portable": DotTile(4, 2), "avxvnni": DotTile(3, 4)}
    return tiles.get(isa.name, DotTile(4, 4))


def reads(isa: ISA, words: int, parts: int) -> tvm.tirx.PrimFunc:
    """Returns a kernel, not compiled, that measures the memory bandwidth: it sums an array of `words` int32
    values, split into `parts` equal parts, one per thread. The end of a part that fills less than four
    vectors is left out."""
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
    """Returns a kernel that executes TURNS times CHAINS multiply-adds of float32 vectors in each of `parts`
    parts, one per thread."""

    def body() -> None:
        out = argument("out", (parts, CHAINS * isa.lanes), "float32")
        with T.sblock("products"), T.parallel(i64(parts)) as part:
            factor = T.bind(out[part, span(0, isa.lanes)])
            sums = [register(f32(c, isa.lanes), isa.lanes) for c in range(CHAINS)]
            with T.serial(0, i64(TURNS)):
                for total in sums:
                    total.set(fma(total.value, factor, factor, isa.lanes))
            for c, total in enumerate(sums):
                T.buffer_store(out, total.value, [part, span(c * isa.lanes, isa.lanes)])

    return prim_func("products", body)


def dots(isa: ISA, parts: int) -> tvm.tirx.PrimFunc:
    """Returns a kernel that measures the int8 rate: in each of `parts` parts, one per thread, it repeats
    TURNS times the products of a register tile of 4-bit weights with int8 activations.

    weights: int32 [WEIGHT_ROWS, columns * lanes]; activations: int32 [rows], four int8 each.
    """
    form, tile = dot.Products(isa, 4), dot_tile(isa)
    kind, count = _sums(form)

    def body() -> None:
        out = argument("out", (parts, tile.products * count), kind)
        weights = argument("weights", (WEIGHT_ROWS, tile.columns * isa.lanes), "int32")
        activations = argument("activations", (tile.rows,), "int32")
        with T.sblock("dots"), form.adding(), T.parallel(i64(parts)) as part:
            right = [T.bind(activations[row]) for row in range(tile.rows)]
            zero = T.Cast(typed(kind, count), i32(0, count))
            sums = [[register(zero, count, kind) for _ in right] for _ in range(tile.columns)]
            with T.serial(0, i64(TURNS)) as turn:
                for column, totals in enumerate(sums):
                    left = T.bind(weights[turn % WEIGHT_ROWS, span(column * isa.lanes, isa.lanes)])
                    for total, operand in zip(totals, right, strict=True):
                        total.set(_step(form, total.value, left, operand))
            for c, total in enumerate(total for totals in sums for total in totals):
                T.buffer_store(out, total.value, [part, span(c * count, count)])

    return prim_func("dots", body)


def _step(form: dot.Products, total: Expr, weights: Expr, activations: Expr) -> Expr:
    """Emits total + the products of one vector of weights with activations, by the dot-product instruction
    whose speed is measured, and returns the sum. activations: an int32 with four int8 values, which is
    repeated in every lane."""
    if form.row_pairs:
        return form.pair_step(total, weights, splat(activations, form.isa.lanes))
    return form.step(total, weights, activations)


def _sums(form: dot.Products) -> tuple[str, int]:
    """Returns (dtype, number of lanes) of a vector in which products of 4-bit weights and int8 activations
    are summed: int16, or int32 with half as many lanes, depending on the instruction set.
    """
    return ("int16", 2 * form.isa.lanes) if form.narrow else ("int32", form.isa.lanes)


def tiles(parts: int) -> tvm.tirx.PrimFunc:
    """Returns a kernel that measures the rate of AMX: in each of `parts` parts, one per thread, it executes
    TURNS / 2 products of two bfloat16 tiles (16 x 16 results, sums over 32 values).

    A core executes one such product (tdpbf16ps) every 16 cycles. The compiler cannot move the products out of
    the loop, although their operands never change: the intrinsics have side effects.
    """

    def emit(name: str, *arguments: tvm.tirx.Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))

    def body() -> None:
        shapes = argument("shapes", (16,), "int32")
        with T.sblock("tiles"), T.parallel(i64(parts)):
            emit("ldtilecfg", T.address_of(shapes[0]))
            for number in range(8):
                emit("tilezero", T.int8(number))
            with T.serial(0, i64(TURNS // 8)):
                for number in range(4):
                    emit("tdpbf16ps", T.int8(number), T.int8(4 + number // 2), T.int8(6 + number % 2))
            emit("tilerelease")

    return prim_func("tiles", body)


def measure(isa: ISA, parts: int, compiled: Callable[[str], Callable[..., None]]) -> dict[str, float]:
    """Returns {"read": GB/s of memory, "float32": GFlop/s, "int8": Gop/s} of all threads together, each the
    best of three measurements; a product and a sum are two operations. parts: number of threads; compiled:
    function from the name of a kernel to the compiled kernel.

    int8 is the rate of the instructions that multiply quantized weights: byte products, or tiles if these are
    faster.
    """
    data = tvm.runtime.tensor(np.ones(READ // 4, np.int32))
    sums = tvm.runtime.tensor(np.zeros((parts, 4 * isa.lanes), np.int32))
    floats = tvm.runtime.tensor(np.zeros((parts, CHAINS * isa.lanes), np.float32))
    rates = {
        "read": READ / _best(lambda: compiled("reads")(data, sums)) / 1e9,
        "float32": 2 * parts * TURNS * CHAINS * isa.lanes / _best(lambda: compiled("products")(floats)) / 1e9,
        "int8": _int8_rate(isa, parts, compiled("dots")),
    }
    if isa.amx:
        palette = np.array([1, *[0] * 3, *[0x400040] * 4, *[0] * 4, *[0x10101010] * 2, 0, 0], np.int32)
        shapes = tvm.runtime.tensor(palette)
        seconds = _best(lambda: compiled("tiles")(shapes))
        rates["int8"] = max(rates["int8"], 2 * parts * (TURNS // 8 * 4) * 16 * 16 * 32 / seconds / 1e9)
    return rates


def _int8_rate(isa: ISA, parts: int, run: Callable[..., None]) -> float:
    """Returns the rate of int8 products in registers, all threads together, in Gop/s, a product and a sum
    being two operations. parts: number of threads; run: the compiled kernel of `dots`."""
    form, tile = dot.Products(isa, 4), dot_tile(isa)
    kind, count = _sums(form)
    rng = np.random.default_rng(0)
    out = tvm.runtime.tensor(np.zeros((parts, tile.products * count), kind))
    codes = rng.integers(0, 16, (WEIGHT_ROWS, 4 * tile.columns * isa.lanes), np.uint8)
    weights = tvm.runtime.tensor(codes.view(np.int32))
    activations = tvm.runtime.tensor(rng.integers(-127, 127, 4 * tile.rows, np.int8).view(np.int32))
    macs = parts * TURNS * tile.products * 4 * isa.lanes * (2 if form.row_pairs else 1) // form.parts
    return 2 * macs / _best(lambda: run(out, weights, activations)) / 1e9


def _best(run: Callable[[], object]) -> float:
    """Calls `run` three times, without a warm-up, and returns the wall seconds of the shortest call."""

    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return min(once() for _ in range(3))


def main() -> None:
    parts = int(sys.argv[1])
    target = presets.resolve(sys.argv[2])
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
