"""Tests of the products with small unquantized matrices, such as routers, compared with float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.dense import DenseRows
from mlcbuild.compiler.cpu.kernels.exact_product import exact_product
from mlcbuild.compiler.cpu.kernels.prologue import SERIAL_BYTES, Fusion, Given
from tests import kernelbench
from tests.kernelbench import SAME_FLOATS, TARGETS

K = 328
SMALL, LARGE = 3, 101
"""Numbers of matrix rows, neither a multiple of a tile. The product with the small matrix is divided among
cores by rows of x, that with the large one by rows of the matrix."""


def product(isa: str, n: int) -> tvm.tirx.PrimFunc:
    return exact_product(DenseRows(isa_for(TARGETS[isa]), n, K, "float16"), Fusion(Given()))


@pytest.mark.parametrize("isa", [isa for isa in TARGETS if isa not in SAME_FLOATS])
def test_a_row_has_the_same_bits_whatever_the_others_are(isa: str) -> None:
    kernelbench.need(TARGETS[isa])
    assert SMALL * K * 2 < SERIAL_BYTES < LARGE * K * 2
    functions = {n: product(isa, n) for n in (SMALL, LARGE)}
    module = kernelbench.compiled(TARGETS[isa], list(functions.values()))
    rng = np.random.default_rng(3)
    for n, function in functions.items():
        matrix = rng.standard_normal((n, K)).astype(np.float16)
        x = rng.standard_normal((37, K)).astype(np.float32)
        together = module.run(function, (37, n), x, matrix)
        expected = x.astype(np.float64) @ matrix.astype(np.float64).T
        assert np.abs(together - expected).max() < 1e-5 * np.sqrt(K)
        for start, stop in ((0, 1), (36, 37), (3, 5), (7, 15)):
            alone = module.run(function, (stop - start, n), x[start:stop], matrix)
            np.testing.assert_array_equal(alone.view(np.uint32), together[start:stop].view(np.uint32))
