"""Tests of the passes that lower CPU kernels."""

from __future__ import annotations

import pytest
from tvm import IRModule
from tvm.tirx import PrimFunc
from tvm.tirx.transform import BindTarget

from mlcbuild.compiler.cpu.isa import isa_for, tvm_target
from mlcbuild.compiler.cpu.kernels import expert_product
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.expert_product import ExpertMatrices
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given
from mlcbuild.compiler.cpu.lowering import KERNELS
from tests.kernelbench import TARGETS
from tests.schemes import SCHEMES


def simplified(isa: str, function: PrimFunc) -> tuple[str, str]:
    """Returns the program text of a kernel (before, after) the pass that simplifies it."""
    target = tvm_target(TARGETS[isa])
    mod = BindTarget(target)(IRModule({"kernel": function.with_attr("global_symbol", "kernel")}))
    for name, make in KERNELS:
        before = mod.script()
        with target:
            mod = make()(mod)
        if name == "simplify":
            return before, mod.script()
    raise AssertionError("no pass simplifies")


@pytest.mark.parametrize("isa", ["avx512amx", "avx2"])
def test_attention_does_not_grow(isa: str) -> None:
    heads = Heads(2, 9, 3, 64, "float16")
    before, after = simplified(isa, attention(AttentionKernel(isa_for(TARGETS[isa]), heads, 0.125, None)))
    assert len(after) < 1.1 * len(before)


def test_products_of_experts_do_not_grow() -> None:
    stack = ExpertMatrices(linear(isa_for(TARGETS["avx2"]), SCHEMES["q4a8_1"], 64, 64), 8, 2)
    for scatter in (False, True):
        before, after = simplified("avx2", expert_product.kernel(stack, Given(), scatter))
        assert len(after) < 1.1 * len(before)


def test_other_products_are_simplified() -> None:
    product = linear(isa_for(TARGETS["avx2"]), SCHEMES["q4f16_1"], 64, 64)
    before, after = simplified("avx2", kernel(product, Fusion()))
    assert after != before
