"""Tests of quantization budgets: how many bytes of weights a limit of bits or of size allows, and how a
mixture of formats is expressed as one base format and overrides by patterns of parameter names."""

from __future__ import annotations

import pytest

from mlcbuild.models import Param
from mlcbuild.quant.budget_limits import base_and_overrides, budget_fault, byte_limit, weight_count
from mlcbuild.quant.scheme import Storage, matches

LAYERS = [f"layers.{i}.mlp.{kind}.weight" for i in range(4) for kind in ("gate_up", "down")]
PARAMS = [Param(name, (64, 32)) for name in (*LAYERS, "lm_head.weight")]
FOUR, FULL = Storage("four", "q4s", "x16", 8), Storage("full", "f32", "plain", 0)


def test_bits_are_those_of_all_weights() -> None:
    assert weight_count(PARAMS) == 9 * 64 * 32
    assert byte_limit("target_bits", 5, PARAMS) == 9 * 64 * 32 * 5 // 8
    assert byte_limit("max_size", 1234, PARAMS) == 1234
    assert byte_limit("max_kl", 0.1, PARAMS) is None


def test_a_budget_below_the_smallest_mixture_is_a_fault() -> None:
    size = sum(64 * 32 * 4.5 / 8 for _ in PARAMS)  # 4 bits, and a float16 for each 32 weights
    assert budget_fault("max_size", size, [FULL, FOUR], PARAMS) == ""
    fault = budget_fault("max_size", size - 1, [FULL, FOUR], PARAMS)
    assert "the smallest mixture of full, four has 4.5 bits a weight" in fault and "raise max_size" in fault
    assert budget_fault("target_bits", 4.4, [FOUR], PARAMS).startswith("target_bits is 4.4, but ")
    assert budget_fault("target_bits", 4.5, [FOUR], PARAMS) == budget_fault("max_kl", 0, [FULL], PARAMS) == ""


@pytest.mark.parametrize(
    "others", [{LAYERS[1]: "b"}, dict.fromkeys(LAYERS[1::2], "b"), {LAYERS[0]: "b", "lm_head.weight": "c"}]
)
def test_overrides_name_exactly_the_others(others: dict[str, str]) -> None:
    names = {param.name: others.get(param.name, "a") for param in PARAMS}
    base, overrides = base_and_overrides(names, PARAMS)
    assert base == "a"
    chosen = {
        name: next((scheme for pattern, scheme in overrides if matches(pattern, name)), base)
        for name in names
    }
    assert chosen == names
