"""Tests of the GPU kernels that read quantized matrices, compared with float64 products of the values that
the matrices represent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.limits import Limits
from numpy.typing import NDArray

from mlcbuild.checkpoints import gguf_blocks
from mlcbuild.compiler.gpu.call_sizes import CallSizes
from mlcbuild.compiler.gpu.kernels import expert_rows, logits, product, tile_product
from mlcbuild.compiler.gpu.kernels.expert_rows import ExpertsSpec
from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.kernels.storage import stored_as
from mlcbuild.models import RmsNorm
from mlcbuild.quant.blocks import BlockRows
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.format import load_format
from mlcbuild.targets.backends import GPU_LAYOUTS
from tests import gpu_kernels, gpu_page
from tests.blocks import finite_rows, kind_of
from tests.compiler.test_block_kernels import TYPES
from tests.libharness import EVERY
from tests.runtime.test_page import Browser

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(600)]
ROWS, COLUMNS = 50, 512
NARROW = 328
"""A number of columns for matrices that is a multiple neither of 32 (the group of weights that share a scale)
nor of 256 (a block of GGUF formats)."""
FORMS = [name for name, layout in GPU_LAYOUTS.items() if layout == "row"]
FLOATS = ("e4m3", "e5m2")
"""Names of the formats whose codes are 8-bit floats. Codes here are below 120 without their sign: such
numbers are finite in both."""
SAMPLE = FORMS if EVERY else ["q4_k", "q6_k"]
RAGGED = [name for name in FORMS if name not in (*TYPES, *FLOATS)] if EVERY else ["q3l", "q5l"]
CONVERTED = [] if EVERY else ["nvfp4", "e4m3"]
"""Formats whose codes are converted to other numbers, tested in products only: one with a table, whose groups
of 32 columns have two scales each, and one of 8-bit floats."""
BROWSER = (*SAMPLE[:1], *RAGGED[:1])
"""Names of the weight formats whose matrix products are also tested in Chromium. They are few, because
Chromium compiles the kernels of one format for 5 seconds."""
CASES = pytest.mark.parametrize("form", SAMPLE)
LIMIT = 2e-6
"""Largest allowed error of a product, as a fraction of the sum of the magnitudes of its 512 float32 terms."""
PLACES = CallSizes(ROWS, Limits(context_window=64, prefill_chunk=64, max_batch=4)).places


Run = Callable[..., dict[str, NDArray[Any]]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with gpu_page.page() as browser:
        yield browser


@pytest.fixture(params=["adapter", "opencl", "chromium"])
def run(request: pytest.FixtureRequest) -> Run:
    """Returns a function that executes one kernel, on the host that the test's parameter names: wgpu, OpenCL
    or Chromium."""
    if request.param == "chromium":
        if request.node.callspec.params["form"] not in BROWSER and not EVERY:
            pytest.skip("MLCBUILD_TEST_EVERY is not set: browsers compile kernels for minutes")
        return partial(gpu_page.on_page, request.getfixturevalue("browser"))
    return gpu_kernels.HOSTS[request.param]


@cache
def matrix(form: str, columns: int = COLUMNS) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """Returns (kernel argument -> stored tensor; the matrix as float64 values) of a random matrix of 50 rows,
    quantized in the format called `form`."""
    definition = load_format(form, "row")
    if form in FLOATS:
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 120, (ROWS, columns)) + 128 * rng.integers(0, 2, (ROWS, columns))
        scales = np.exp(rng.standard_normal((ROWS, columns // 32)) - 3).astype(np.float32)
        assert definition.pack_blocks is not None
        tensors = definition.pack_blocks([BlockRows(codes.astype(np.uint8), scales)], "matrix")
    elif form not in TYPES:
        weights = np.random.default_rng(1).standard_normal((ROWS, columns)).astype(np.float32)
        tensors = definition.pack(weights, Scratch(), "matrix")
    else:
        types = TYPES[form]
        rows = [
            gguf_blocks.unpack(finite_rows(name, ROWS // len(types), columns, index), kind_of(name))
            for index, name in enumerate(types)
        ]
        assert definition.pack_blocks is not None
        tensors = definition.pack_blocks(rows, "matrix")
    values = definition.unpack(tensors, (ROWS, columns)).astype(np.float64)
    return dict(zip("ws", tensors, strict=True)), values


def activations(count: int, columns: int = COLUMNS) -> NDArray[np.float32]:
    return np.random.default_rng(count).standard_normal((count, columns)).astype(np.float32)


def check(actual: NDArray[Any], x: NDArray[np.float32], values: NDArray[np.float64]) -> None:
    wide = x.astype(np.float64)
    limit = LIMIT * (np.abs(wide) @ np.abs(values.T)).max()
    assert np.abs(actual.reshape(len(x), -1) - wide @ values.T).max() < limit


@pytest.mark.parametrize(
    ("form", "columns"),
    [*((form, COLUMNS) for form in (*SAMPLE, *CONVERTED)), *((form, NARROW) for form in RAGGED)],
)
def test_products_of_few_and_of_many_rows(form: str, columns: int, run: Run) -> None:
    tensors, values = matrix(form, columns)
    spec = ProductSpec(ROWS, columns, stored_as(form))
    for make, arguments, count in (
        (product.gemv, (spec, 1), 1),
        (product.gemv, (spec, 4), 6),
        (tile_product.gemm, (spec,), 70),
    ):
        x = activations(count, columns)
        buffers = {**tensors, "x": x, "y": np.zeros((count, ROWS), np.float32)}
        check(run(make, arguments, {"n": count}, buffers)["y"], x, values)


def rms(rows: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the RMS norm of rows, with weights stored as differences from 1 as in Gemma."""
    wide = rows.astype(np.float64)
    scaled = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    return np.asarray(scaled * (1 + weight.astype(np.float64)))


@pytest.mark.parametrize("form", SAMPLE if EVERY else SAMPLE[:1])
def test_a_product_adds_normalized_rows_and_normalizes_the_sum(form: str, run: Run) -> None:
    """Checks a fused GPU kernel for models with a norm after each half of a layer. It normalizes the output
    of the half before and adds it to the residual stream, stores the sum, normalizes that and multiplies it
    by a matrix."""
    tensors, values = matrix(form)
    norm = NormSpec(COLUMNS, RmsNorm(1e-5, 1.0), half=False)
    spec = ProductSpec(ROWS, COLUMNS, stored_as(form), norm=norm, added=norm, added_scale=0.5)
    x, delta = activations(3), 2 * activations(6)[3:]
    weight, post_weight = 0.1 * activations(2)
    buffers = {**tensors, "x": x, "delta": delta, "weight": weight, "post_weight": post_weight}
    buffers |= {"sum": np.zeros_like(x), "y": np.zeros((3, ROWS), np.float32)}
    actual = run(product.gemv, (spec, 2), {"n": 3}, buffers)
    expected = x + 0.5 * rms(delta, post_weight)
    assert np.abs(actual["sum"].reshape(x.shape) - expected).max() < 4e-6
    normed = rms(expected, weight)
    limit = LIMIT * (np.abs(normed) @ np.abs(values.T)).max()
    assert np.abs(actual["y"].reshape(3, ROWS) - normed @ values.T).max() < limit


@CASES
def test_an_embedding_reads_exact_numbers(form: str, run: Run) -> None:
    tensors, values = matrix(form)
    inputs = np.zeros(PLACES.words, np.int32)
    inputs[PLACES.tokens : PLACES.tokens + 5] = [49, 0, 3, 17, 30]
    buffers = {**tensors, "inputs": inputs, "x": np.zeros((5, COLUMNS), np.float32)}
    arguments = (stored_as(form), (ROWS, COLUMNS), 1.0, PLACES)
    actual = run(logits.embed, arguments, {"n": 5, "first": 0}, buffers)["x"]
    expected = values[[49, 0, 3, 17, 30]].ravel()
    assert np.abs(actual - expected).max() <= 2.0**-22 * np.abs(expected).max()


@CASES
def test_products_with_the_matrices_of_experts(form: str, run: Run) -> None:
    """Checks GPU kernels that multiply a row by the matrices of the experts chosen for it, for few and for
    many rows. Five experts have matrices of ten rows each, and each of two input rows selects two experts."""
    tensors, values = matrix(form)
    experts, spec = ExpertsSpec(5, 5, 2), ProductSpec(10, COLUMNS, stored_as(form))
    chosen, x = [4, 1, 0, 4], activations(2)
    weights = np.array([0.5, 1.5, -1, 2], np.float32)
    routes = np.stack([np.array(chosen, np.int32), weights.view(np.int32)], axis=1)
    y = np.zeros((4, 10), np.float32)
    buffers = {**tensors, "x": x, "y": y, "routes": routes}
    scalars = {"n": 2, "choices": 4, "first": 0}
    actual = run(expert_rows.expert_gemv, (spec, experts), scalars, buffers)["y"].reshape(4, 10)
    for choice, expert in enumerate(chosen):
        chosen_rows = values[10 * expert : 10 * expert + 10]
        check(actual[choice], x[choice // 2 : choice // 2 + 1], chosen_rows)
    # Tiles: (expert, first place in the order, number of choices).
    tiles = np.array([[0, 0, 1], [1, 1, 1], [4, 2, 2], [0, 0, 0]], np.int32)
    order = np.array([2, 1, 0, 3], np.int32)
    buffers |= {"order": order, "tiles": tiles}
    del buffers["routes"]
    scalars["tile_count"] = 4
    again = run(expert_rows.expert_gemm, (spec, experts, 2), scalars, buffers)["y"].reshape(4, 10)
    assert np.abs(again - actual).max() < 1e-5 * np.abs(actual).max()
