"""Tests of sorting the stores in functions that compute shapes: TVM orders them by memory addresses, which
differ between processes."""

from __future__ import annotations

from pathlib import Path

import tvm
from mlcbuild_format.limits import Limits
from tvm.script.parser import tirx as T
from tvm.tirx import BufferStore, PrimFunc, SeqStmt

from mlcbuild.compiler import phases
from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.cpu.ops import CpuOps
from mlcbuild.compiler.passes.ordered_shapes import ordered_shapes
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.targets import presets
from tests import typegoldens
from tests.schemes import SCHEMES


@T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]
def descending(H: T.Buffer((T.int64(4),), "int64")):  # type: ignore[no-untyped-def,valid-type]
    T.func_attr({"tirx.is_host_func": True})
    H[T.int64(3)] = H[T.int64(0)] * T.int64(6)
    H[T.int64(2)] = H[T.int64(0)] + T.int64(1)


@T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]
def ascending(H: T.Buffer((T.int64(4),), "int64")):  # type: ignore[no-untyped-def,valid-type]
    T.func_attr({"tirx.is_host_func": True})
    H[T.int64(2)] = H[T.int64(0)] + T.int64(1)
    H[T.int64(3)] = H[T.int64(0)] * T.int64(6)


def places(function: PrimFunc) -> list[int]:
    """Returns the indices, in TVM's array of computed tensor sizes, to which a function stores, in program
    order."""
    body = function.body
    stores = body.seq if isinstance(body, SeqStmt) else [body]
    return [int(store.indices[0]) for store in stores if isinstance(store, BufferStore)]


def test_stores_are_sorted_by_their_places() -> None:
    sorted_ones = [ordered_shapes(tvm.IRModule({"f": each}))["f"] for each in (descending, ascending)]
    assert places(descending) == [3, 2]
    assert [places(each) for each in sorted_ones] == [[2, 3]] * 2
    tvm.ir.assert_structural_equal(*sorted_ones)


def test_every_function_that_computes_shapes_is_sorted(tmp_path: Path) -> None:
    """Checks that every function which computes tensor shapes in a compiled program stores its results in the
    order of their indices in TVM's heap of shapes. The model has latent attention, for which some of these
    functions have several stores."""
    target = presets.resolve("x86-64-v3")
    config = typegoldens.load("deepseek_v3", tmp_path).config
    program = functions.build(Decoder(CpuOps(config, SCHEMES["q0f32"], target), Limits(64, 32, 2)))
    steps = (*phases.PLAN, *phases.LOWER)
    mod = phases.run(program, steps, tvm_target(target), lambda name: None)
    orders = [
        places(function) for name, function in mod.functions.items() if "shape_func" in str(name.name_hint)
    ]
    assert max(map(len, orders)) > 1
    assert orders == [sorted(order) for order in orders]
