"""Tests of matrix products with fused operations (norms, gates, the residual stream), compared with float64
NumPy."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import pytest
import tvm

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.activation import Gate
from mlcbuild.compiler.cpu.kernels.linear import kernel, linear
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Gated, Given, Normed
from tests import kernelbench
from tests.kernelbench import SAME_FLOATS, TARGETS, Floats, Module, Tensor
from tests.libharness import EVERY
from tests.schemes import SCHEMES

pytestmark = pytest.mark.xdist_group("fusion")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""

N, K = 50, 328
"""Rows and columns of the matrices. Neither is a multiple of a tile, and a row of activations does not fit
the stack."""
ROWS = (1, 2, 5, 33)
CASES = (
    ("q4a8_1", "norm"),
    ("q4a8_1", "silu"),
    ("q4f16_1", "gelu"),
    ("q0f32", "norm"),
    ("q0f32", "add"),
)
EPS, OFFSET = 1e-5, 1.0

each_isa = pytest.mark.parametrize("isa", list(TARGETS))


def cases(isa: str) -> list[tuple[str, str]]:
    """Returns (quantization scheme, name of the fused operation) of each matrix product that is tested on an
    instruction set. Where another instruction set has the same kernels for floats, products of floats are
    omitted, and gated products of bytes, too, except for AMX: gates are computed in floats."""
    if EVERY or isa not in SAME_FLOATS:
        return list(CASES)
    return [("q4a8_1", name) for name in ("norm", "silu")[: 1 + (isa == "avx512amx")]]


each_product = pytest.mark.parametrize(
    ("isa", "scheme", "name"), [(isa, *case) for isa in TARGETS for case in cases(isa)]
)


def fusion(isa: str, name: str) -> Fusion:
    created = isa_for(TARGETS[isa])
    return {
        "norm": Fusion(Normed(Norm(created, K, EPS, OFFSET, weight="float16"))),
        "silu": Fusion(Gated(Gate(created, "silu", K), None), residual=True),
        "gelu": Fusion(Gated(Gate(created, "gelu_tanh", K), "float32")),
        "add": Fusion(Given(), bias=True, residual=True),
    }[name]


def function(isa: str, scheme: str, name: str) -> tvm.tirx.PrimFunc:
    return kernel(linear(isa_for(TARGETS[isa]), SCHEMES[scheme], N, K), fusion(isa, name))


@cache
def module(isa: str) -> Module:
    return kernelbench.compiled(TARGETS[isa], [function(isa, *case) for case in cases(isa)])


def silu(x: Floats) -> Floats:
    actual: Floats = x / (1 + np.exp(-x))
    return actual


def gelu(x: Floats) -> Floats:
    actual: Floats = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return actual


def made_ready(name: str, inputs: list[Tensor]) -> Floats:
    """Returns the rows [m, k] that a product multiplies after its fused prologue `name`, computed with NumPy
    in float64."""
    x = inputs[0].astype(np.float64)
    if name == "norm":
        normed: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        return normed * (inputs[1].astype(np.float64) + OFFSET)
    if name == "add":
        return x
    pair = x + inputs[1] if name == "gelu" else x
    return (gelu if name == "gelu" else silu)(pair[:, :K]) * pair[:, K:]


@each_product
def test_fused_product(isa: str, scheme: str, name: str) -> None:
    kernelbench.need(TARGETS[isa])
    rng, fused = np.random.default_rng(6), fusion(isa, name)
    stored, matrix = kernelbench.weights(rng, SCHEMES[scheme], N, K)
    extras: dict[str, list[Tensor]] = {
        "norm": [rng.standard_normal(K).astype(np.float16)],
        "gelu": [rng.standard_normal(2 * K).astype(np.float32)],
    }
    created, rounded = function(isa, scheme, name), SCHEMES[scheme].activation_bits
    ways = (False, True) if isa == "avx512amx" and rounded else (False,)
    for m, bfloat16 in [(m, way) for m in ROWS for way in ways]:
        x = rng.standard_normal((m, 2 * K if name in ("silu", "gelu") else K)).astype(np.float32)
        inputs = [x, *extras.get(name, [])]
        bias = [rng.standard_normal(N).astype(np.float32)] * fused.bias
        before = rng.standard_normal((m, N)).astype(np.float32)
        out = tvm.runtime.tensor(before if fused.residual else np.full_like(before, np.nan))
        arrays = [tvm.runtime.tensor(array) for array in (*inputs, *stored, *bias)]
        module(isa).library[kernelbench.symbol(created)](*arrays, *kernelbench.said(created, bfloat16), out)
        ready = made_ready(name, inputs)
        observed = ready if bfloat16 else kernelbench.activations(ready.astype(np.float32), SCHEMES[scheme])
        expected = observed @ matrix.T + (before if fused.residual else 0) + (bias[0] if bias else 0)
        error = np.abs(out.numpy() - expected)
        tight = (2e-2 * max(1, np.abs(ready).std()) if bfloat16 else 1e-5) * np.sqrt(K)
        if rounded and not bfloat16:
            # A value half-way between two 8-bit levels goes up or down by its last bit: a few do.
            assert np.quantile(error, 0.75) < tight, f"m={m}"
            tight = 3 * np.abs(ready).max() / 127 * np.abs(matrix).max()
        assert error.max() < tight, f"m={m}"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_tile_registers_hand_gated_rows_on(activation: Literal["silu", "gelu_tanh"]) -> None:
    """Checks two consecutive products on tile registers: the first one, with the gate and up matrices, passes
    its gated results to the second one as bfloat16 tiles."""
    target, scheme, (hidden, inner) = TARGETS["avx512amx"], SCHEMES["q4a8_1"], (96, 352)
    kernelbench.need(target)
    isa, rng = isa_for(target), np.random.default_rng(9)
    gate = Gate(isa, activation, inner)
    first = kernel(linear(isa, scheme, 2 * inner, hidden), Fusion(gate=gate))
    second = kernel(linear(isa, scheme, hidden, inner), Fusion(Gated(gate, None, packed=True), residual=True))
    built = kernelbench.compiled(target, [first, second]).library
    ups, matrix = kernelbench.weights(rng, scheme, 2 * inner, hidden)
    down, last = kernelbench.weights(rng, scheme, hidden, inner)
    for m in (1, 2, 7, 33, 63, 64, 97, 130, 550):
        x = (rng.standard_normal((m, hidden)) / np.sqrt(hidden)).astype(np.float32)
        before = rng.standard_normal((m, hidden)).astype(np.float32)
        pair = tvm.runtime.tensor(np.full((m, 2 * inner), np.nan, np.float32))
        out = tvm.runtime.tensor(before)
        for function, inputs, stored, into in (
            (first, tvm.runtime.tensor(x), ups, pair),
            (second, pair, down, out),
        ):
            arrays = [tvm.runtime.tensor(array) for array in stored]
            built[kernelbench.symbol(function)](inputs, *arrays, 1, into)
        both = x.astype(np.float64) @ matrix.T
        act = gelu if activation == "gelu_tanh" else silu
        ready = act(both[:, :inner]) * both[:, inner:]
        error = (out.numpy() - (before + ready @ last.T)) / (ready.std() * np.sqrt(inner))
        # Rounding to 8 bits costs about 2^-9: for x, for the weights of both products, for the rows between.
        assert np.sqrt((error**2).mean()) < 8e-3, f"m={m}"
        assert np.abs(error).max() < 4e-2, f"m={m}"


@each_isa
def test_a_row_is_the_same_in_every_company(isa: str) -> None:
    """Checks that a few rows together give the same bits as each row alone: fused prologues and epilogues do
    not depend on the batch."""
    kernelbench.need(TARGETS[isa])
    rng, fused = np.random.default_rng(7), function(isa, "q4a8_1", "norm")
    stored, _ = kernelbench.weights(rng, SCHEMES["q4a8_1"], N, K)
    weight = rng.standard_normal(K).astype(np.float16)
    x = rng.standard_normal((5, K)).astype(np.float32)
    together = module(isa).run(fused, (5, N), x, weight, *stored)
    alone = [module(isa).run(fused, (1, N), row[None], weight, *stored) for row in x]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_names_say_what_is_fused() -> None:
    assert [kernelbench.symbol(function("avx2", *case)) for case in CASES] == [
        "rms_norm_1em05_plus1p0_f16_w4a8_50x328",
        "silu_w4a8_50x328_add",
        "bias_f32_gelu_tanh_w4f16_50x328",
        "rms_norm_1em05_plus1p0_f16_f32_50x328",
        "f32_50x328_bias_add",
    ]


def test_norms_that_differ_have_kernels_of_different_names() -> None:
    """Checks that normalization kernels which differ in epsilon, in the offset of their weights or in kind
    (RMS or layer norm) have different names, because one library may contain several of them."""
    isa = isa_for(TARGETS["avx2"])
    norms = [
        Norm(isa, K, eps, offset, centered, weight="float16")
        for eps in (1e-5, 1e-6, 2.5e-6)
        for offset in (0.0, 1.0)
        for centered in (False, True)
    ]
    names = [Normed(norm).name for norm in norms]
    assert len(set(names)) == len(norms) and all(name.isidentifier() for name in names)
