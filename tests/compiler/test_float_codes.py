"""Tests of the CPU kernels that read matrices of 8-bit floats, compared with float64 products of the values
that the package ml_dtypes reads."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import embedding
from mlcbuild.compiler.cpu.kernels.embedding import Embedding
from mlcbuild.compiler.cpu.kernels.float_codes import FloatCodeRows
from mlcbuild.compiler.cpu.kernels.linear import Linear, kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.quant import Storage
from mlcbuild.quant.blocks import E4M3, BlockRows
from tests import kernelbench
from tests.kernelbench import TARGETS, Module
from tests.libharness import EVERY

pytestmark = pytest.mark.xdist_group("kernels")
PEERS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ROWS, COLUMNS = 50, 352
"""The number of columns is a multiple of 32, the columns that share a scale, but of no vector's block."""
CASES = pytest.mark.parametrize(
    ("isa", "form"),
    [(isa, form) for isa in TARGETS for form in PEERS]
    if EVERY
    else [("avx2", "e4m3"), ("avx2", "e5m2"), ("neon", "e4m3"), ("portable", "e5m2")],
)


def storage(form: str) -> Storage:
    return Storage(form, form, "row")


@cache
def matrix(form: str) -> tuple[tuple[NDArray[np.generic], ...], NDArray[np.float64]]:
    """Returns (stored tensors; values in float64) of a random matrix of 8-bit floats, among which all finite
    ones are, subnormal ones too."""
    rng = np.random.default_rng(7)
    every = np.arange(256, dtype=np.uint8)
    finite = every[np.isfinite(every.view(PEERS[form]).astype(np.float32))]
    codes = rng.permutation(np.resize(finite, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    scales = np.exp(rng.standard_normal((ROWS, COLUMNS // 32))).astype(np.float32)
    values = codes.view(PEERS[form]).astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    definition = storage(form).definition
    assert definition.pack_blocks is not None
    arrays = definition.pack_blocks([BlockRows(codes, scales)], "matrix")
    unpacked = definition.unpack(arrays, (ROWS, COLUMNS))
    assert (unpacked == values.astype(np.float32)).all()
    return tuple(arrays), values


def product(isa: str, form: str) -> Linear:
    return linear(isa_for(TARGETS[isa]), storage(form), ROWS, COLUMNS)


def table(isa: str, form: str) -> Embedding:
    return embedding.embedding(isa_for(TARGETS[isa]), storage(form), ROWS, COLUMNS)


@cache
def module(isa: str) -> Module:
    functions = [kernel(product(isa, form), Fusion()) for form in PEERS]
    functions += [embedding.kernel(table(isa, form)) for form in PEERS]
    return kernelbench.compiled(TARGETS[isa], functions)


def test_names_of_kernels_state_the_bits_of_the_floats() -> None:
    isa = isa_for(TARGETS["avx2"])
    assert FloatCodeRows(isa, 1, 32, 8, "float32", E4M3).name == "we4m3"
    assert product("avx2", "e5m2").name == "we5m2.avx2"


@CASES
def test_a_product_uses_the_values_of_the_checkpoint(isa: str, form: str) -> None:
    """Checks products for 1 to 40 rows of activations against float64. The result of a row must have the same
    bits in any batch of up to 16 rows."""
    kernelbench.need(TARGETS[isa])
    stored, values = matrix(form)
    created = kernel(product(isa, form), Fusion())
    x = kernelbench.rows(np.random.default_rng(1), 40, COLUMNS)
    alone = module(isa).run(created, (1, ROWS), x[:1], *stored)
    for m in (1, 3, 16, 40):
        actual = module(isa).run(created, (m, ROWS), x[:m], *stored)
        wide = x[:m].astype(np.float64)
        bound = 3e-6 * (np.abs(wide) @ np.abs(values.T))
        assert (np.abs(actual - wide @ values.T) <= bound).all(), m
        assert m > 16 or (actual[:1] == alone).all(), m


@CASES
def test_a_table_has_the_values_of_the_checkpoint(isa: str, form: str) -> None:
    kernelbench.need(TARGETS[isa])
    stored, values = matrix(form)
    tokens = np.array([0, 49, 5, 5, 17], np.int32)
    created = embedding.kernel(table(isa, form))
    actual = module(isa).run(created, (len(tokens), COLUMNS), tokens, *stored)
    assert (actual == values[tokens].astype(np.float32)).all()
