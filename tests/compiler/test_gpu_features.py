"""Tests of GPU kernels that use optional features (subgroups, float16 arithmetic, products of packed bytes):
compared with kernels without these features, and with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import FEATURES, PACKED_PRODUCTS, SHADER_F16, SUBGROUPS
from numpy.typing import NDArray

from mlcbuild.compiler.gpu.call_sizes import CallSizes
from mlcbuild.compiler.gpu.emitter import Emitter
from mlcbuild.compiler.gpu.kernels import (
    expert_rows,
    latent_heads,
    norm_rows,
    product,
    product_pair,
    tile_product,
)
from mlcbuild.compiler.gpu.kernels.expert_rows import ExpertsSpec
from mlcbuild.compiler.gpu.kernels.latent_heads import LatentSpec
from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec
from mlcbuild.compiler.gpu.kernels.packed_product import can_pack
from mlcbuild.compiler.gpu.kernels.page_layout import CacheSpec
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.kernels.storage import stored_as
from mlcbuild.compiler.gpu.reductions import Operation, reduced
from mlcbuild.compiler.gpu.tensorir import WORKGROUP, KernelBuilder, kernel, put
from mlcbuild.models import LayerNorm, RmsNorm
from tests import gpu_kernels, gpu_page
from tests.compiler.test_gpu_formats import COLUMNS, LIMIT, NARROW, ROWS, activations, matrix, rms
from tests.libharness import EVERY
from tests.runtime.test_page import Browser

pytestmark = [pytest.mark.xdist_group("gpu"), pytest.mark.timeout(600)]
Run = Callable[..., dict[str, NDArray[Any]]]
LIMITS = Limits(context_window=64, prefill_chunk=64, max_batch=4)
PACKED = frozenset({PACKED_PRODUCTS, SUBGROUPS})
CASES = [("q4l", NARROW)]
if EVERY:
    CASES += [(form, columns) for form in ("q4s", "q8s", "q4_0") for columns in (COLUMNS, NARROW)]
    CASES += [("q4_k", COLUMNS)]  # it has whole blocks of 256 columns


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with gpu_page.page() as browser:
        yield browser


@pytest.fixture(params=["adapter", "chromium"])
def run(request: pytest.FixtureRequest) -> Run:
    """Returns the function that executes one GPU kernel: through wgpu on this machine's adapter or in
    Chromium, as the test's parameter states. The kernels may use optional features of the device."""
    if request.param == "chromium":
        return partial(gpu_page.on_page, request.getfixturevalue("browser"))
    return gpu_kernels.on_adapter


def rounded(x: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the values of rows after rounding to 8 bits with one scale for each group of 32 columns, as
    float64 of the same shape."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % 32)))
    groups = padded.reshape(len(x), -1, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 127
    codes = np.rint(np.divide(groups, step, out=np.zeros_like(groups), where=step > 0))
    return np.asarray((codes * step).reshape(padded.shape)[:, : x.shape[1]])


@pytest.mark.parametrize(("form", "columns"), CASES)
def test_packed_products_round_activations_as_cpus_do(form: str, columns: int, run: Run) -> None:
    tensors, values = matrix(form, columns)
    spec = ProductSpec(ROWS, columns, stored_as(form), rounds_inputs=True)
    for count, rows in ((1, 1), (6, 4)):
        x = activations(count, columns)
        x[0, :32] = 0
        buffers = {**tensors, "x": x, "y": np.zeros((count, ROWS), np.float32)}
        actual = run(product.gemv, (spec, rows), {"n": count}, buffers, PACKED)["y"].reshape(count, ROWS)
        # A value near the middle between two codes may become either.
        step = np.abs(x).max() / 127 * np.abs(values).max()
        assert np.abs(actual - rounded(x) @ values.T).max() < LIMIT * COLUMNS + 2 * step
        largest = np.abs(values).max()
        assert np.median(np.abs(actual - rounded(x) @ values.T)) < 3e-5 * largest
        assert np.abs(actual - x.astype(np.float64) @ values.T).max() > 3e-4 * largest, "x is rounded"


def test_packed_products_of_chosen_experts(run: Run) -> None:
    tensors, values = matrix("q4l")
    experts = ExpertsSpec(5, 5, 2)
    spec = ProductSpec(10, COLUMNS, stored_as("q4l"), rounds_inputs=True)
    routes, x = np.array([[4, 0], [1, 0], [0, 0], [4, 0]], np.int32), activations(2)
    buffers = {**tensors, "x": x, "y": np.zeros((4, 10), np.float32), "routes": routes}
    scalars = {"n": 2, "choices": 4, "first": 0}
    actual = run(expert_rows.expert_gemv, (spec, experts), scalars, buffers, PACKED)["y"].reshape(4, 10)
    for choice, (expert, _) in enumerate(routes):
        expected = rounded(x)[choice // 2] @ values[10 * expert : 10 * expert + 10].T
        assert np.median(np.abs(actual[choice] - expected)) < 1e-4


def test_two_products_of_the_same_rows_in_one_launch(run: Run) -> None:
    """Checks the GPU kernel of two products whose matrices have different formats, one with a gate. Its
    workgroups compute one or the other, and a row has the same bits however many rows they multiply."""
    tensors, values = matrix("q4s")
    norm, form = NormSpec(COLUMNS, RmsNorm(1e-5, 1.0), half=False), stored_as("q4s")
    first = ProductSpec(7, COLUMNS, stored_as("f32"), norm=norm, half_bias=False)
    second = ProductSpec(ROWS // 2, COLUMNS, form, norm=norm, gate="relu")
    x, weight, w, bias = activations(5), 0.1 * activations(2)[0], activations(7), activations(7)[0, :7]
    arrays = {"x": x, "weight": weight, "w": w, "bias": bias, "y": np.zeros((5, 7), np.float32)}
    arrays |= {f"{name}2": tensor for name, tensor in tensors.items()}
    arrays["y2"] = np.zeros((5, ROWS // 2), np.float32)
    normed = rms(x, weight)
    products = normed @ values.T
    gated = np.maximum(products[:, : ROWS // 2], 0) * products[:, ROWS // 2 :]
    limit = LIMIT * (np.abs(normed) @ np.abs(values.T)).max()
    results = []
    for rows, features in ((4, {SUBGROUPS}), (1, {SUBGROUPS}), (1, set[str]())):
        arguments = (first, second, rows)
        actual = run(product_pair.gemv_pair, arguments, {"n": 5}, arrays, frozenset(features))
        assert np.abs(actual["y"].reshape(5, 7) - (normed @ w.T + bias)).max() < 5 * limit
        assert np.abs(actual["y2"].reshape(5, -1) - gated).max() < limit * 2 * np.abs(products).max()
        results.append(actual)
    assert all(np.array_equal(results[0][name], results[1][name]) for name in ("y", "y2"))


def test_the_sum_of_experts_includes_a_shared_product(run: Run) -> None:
    """Checks the GPU kernel that adds up the outputs of a row's experts and of a feed-forward that all rows
    share. Its launch binds experts 1 to 3 of five, so it leaves out the others."""
    tensors, values = matrix("q4s")
    spec = ProductSpec(10, COLUMNS, stored_as("q4s"), residual=True, scale=0.5)
    shared, weights = ProductSpec(10, 72, stored_as("f32")), np.array([0.5, 1.5, -1, 2], np.float32)
    chosen, x, gated, w2 = [3, 1, 0, 2], activations(4), activations(2)[:, :72], activations(10)[:, :72]
    y = activations(2)[:, -10:]
    first = {name: np.ascontiguousarray(tensor[len(tensor) // 5 :]) for name, tensor in tensors.items()}
    part = {name: tensor[: len(tensor) * 3 // 4] for name, tensor in first.items()}
    routes = np.stack([np.array(chosen, np.int32), weights.view(np.int32)], axis=1)
    arrays = {**part, "x": x, "y": y, "routes": routes, "gated": gated, "w2": w2}
    expected = gated.astype(np.float64) @ w2.T
    for choice, expert in enumerate(chosen):
        if 1 <= expert < 4:
            expected[choice // 2] += weights[choice] * (x[choice] @ values[10 * expert : 10 * expert + 10].T)
    scalars = {"n": 2, "choices": 4, "first": 1}
    arguments = (spec, ExpertsSpec(5, 3, 2), shared)
    for features in (frozenset({SUBGROUPS}), frozenset[str]()):
        actual = run(expert_rows.expert_sum, arguments, scalars, arrays, features)["y"].reshape(2, 10)
        assert np.abs(actual - (y + 0.5 * expected)).max() < 1e-4


def reducing(name: str, count: int, how: Operation) -> KernelBuilder:
    """Returns a GPU kernel that computes y[i] as the sum or the maximum of a run of consecutive values of x,
    namely the run of `count` values that contains x[i]. how: "add" or "max"."""
    with kernel(name) as k:
        x, y = k.buffer("x", (WORKGROUP,)), k.buffer("y", (WORKGROUP,))
        with k.launch(WORKGROUP, 1) as (_, _y, tx):
            (result,) = reduced(k, [x[tx]], [k.shared(WORKGROUP)], (tx, count), how)
            put(y, result, tx)
    return k


def test_runs_of_every_length(run: Run) -> None:
    x = np.random.default_rng(5).integers(-99, 99, WORKGROUP).astype(np.float32)
    operations: tuple[Operation, ...] = ("add", "max")
    for count in (1, 2, 8, 64):
        for how in operations:
            runs = x.reshape(-1, count)
            expected = np.repeat(runs.sum(axis=1) if how == "add" else runs.max(axis=1), count)
            for features in (frozenset({SUBGROUPS}), frozenset[str]()):
                actual = run(reducing, (count, how), {}, {"x": x, "y": np.zeros_like(x)}, features)["y"]
                assert np.array_equal(actual, expected), (count, how, features)


def test_formats_whose_codes_become_bytes() -> None:
    assert [name for name in ("f16", "q4s", "q5s", "q8s", "q8f16") if can_pack(stored_as(name))] == [
        "q4s",
        "q8s",
    ]


@pytest.mark.parametrize("rows", [1, 4])
def test_sums_over_subgroups(rows: int, run: Run) -> None:
    """Checks a fused GPU kernel of RMS norm and matrix product on devices with subgroups. It needs two kinds
    of sums: of squares over all threads of a workgroup, and of products over the threads that share a row."""
    tensors, values = matrix("q4l")
    norm = NormSpec(COLUMNS, RmsNorm(1e-5, 1.0), half=False)
    spec = ProductSpec(ROWS, COLUMNS, stored_as("q4l"), norm=norm)
    x, weight = activations(5), 0.1 * activations(2)
    buffers = {**tensors, "x": x, "weight": weight[0], "y": np.zeros((5, ROWS), np.float32)}
    arguments, sizes = (spec, rows), {"n": 5}
    actual = run(product.gemv, arguments, sizes, buffers, frozenset({SUBGROUPS}))["y"].reshape(5, ROWS)
    normed = rms(x, weight[0])
    limit = LIMIT * (np.abs(normed) @ np.abs(values.T)).max()
    assert np.abs(actual - normed @ values.T).max() < limit


def test_norms_and_softmax_over_subgroups(run: Run) -> None:
    x = activations(3)
    spec, subgroups = NormSpec(COLUMNS, LayerNorm(1e-5), half=False), frozenset({SUBGROUPS})
    buffers = {"x": x, "y": np.zeros_like(x), "weight": np.ones(COLUMNS, np.float32)}
    if spec.has_bias:
        buffers["shift"] = np.zeros(COLUMNS, np.float32)
    actual = run(norm_rows.norm, (spec,), {"n": 3}, buffers, subgroups)["y"].reshape(x.shape)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.abs(actual - expected).max() < 1e-5


def test_queries_and_the_cached_row_of_latent_attention_in_one_launch(run: Run) -> None:
    """Checks the GPU kernel that splits and rotates the queries of each head and appends a normalized latent,
    with its rotated key, to the KV cache. Its workgroups do one or the other, with barriers for one only."""
    heads, latent, plain, rope = 3, 70, 9, 4
    rng = np.random.default_rng(2)
    queries, latents = rng.standard_normal((2, heads, plain + rope)), rng.standard_normal((2, latent + rope))
    weight, angles = rng.standard_normal(latent), rng.standard_normal((64, rope // 2))
    places, slots, positions = CallSizes(64, LIMITS).places, [19, 2], [7, 30]
    inputs = np.zeros(places.words, np.int32)
    inputs[places.slots : places.slots + 2], inputs[places.positions : places.positions + 2] = (
        slots,
        positions,
    )

    def rotated(vectors: NDArray[Any], row: int) -> NDArray[Any]:
        turned = (vectors[..., :2] + 1j * vectors[..., 2:]) * np.exp(1j * angles[positions[row]])
        return np.concatenate([turned.real, turned.imag], axis=-1)

    arrays = {
        "queries": queries.astype(np.float32),
        "latents": latents.astype(np.float32),
        "weight": weight.astype(np.float32),
        "table": np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32),
        "inputs": inputs,
        "plain": np.zeros((2, heads * plain), np.float32),
        "query": np.zeros((2, heads * (latent + rope)), np.float32),
        "pages": np.zeros((2, 16 * (latent + rope)), np.float32),
    }
    cache = CacheSpec(heads, 1, latent + rope, half=False, latent=latent)
    arguments = (cache, LatentSpec(heads, latent, plain, rope, 64), NormSpec(latent, RmsNorm(1e-5), False))
    for features in (frozenset({SUBGROUPS}), frozenset[str]()):
        sizes = {"n": 2, "pages_count": 2}
        actual = run(latent_heads.prepare_latents, (*arguments, places), sizes, arrays, features)
        assert np.array_equal(actual["plain"], arrays["queries"][..., :plain].ravel())
        query = actual["query"].reshape(2, heads, latent + rope)
        pages = actual["pages"].reshape(-1, latent + rope)
        for row in range(2):
            assert np.abs(query[row, :, latent:] - rotated(queries[row, :, plain:], row)).max() < 1e-6
            normed = latents[row, :latent] / np.sqrt((latents[row, :latent] ** 2).mean() + 1e-5) * weight
            appended = np.concatenate([normed, rotated(latents[row, latent:], row)])
            assert np.abs(pages[slots[row]] - appended).max() < 4e-6
        assert np.count_nonzero(pages.any(axis=1)) == 2


def test_tiles_of_float16_keep_eleven_bits() -> None:
    tensors, values = matrix("q4l")
    spec = ProductSpec(ROWS, COLUMNS, stored_as("q4l"), half_tiles=True)
    x = activations(70)
    x[3, 5] = 1e6  # more than float16 holds
    buffers = {**tensors, "x": x, "y": np.zeros((70, ROWS), np.float32)}
    features = frozenset({SHADER_F16})
    actual = gpu_kernels.on_adapter(tile_product.gemm, (spec,), {"n": 70}, buffers, features)["y"]
    x[3, 5] = 65504
    wide = x.astype(np.float64)
    limit = 2.0**-10 * (np.abs(wide) @ np.abs(values.T)).max(axis=1, keepdims=True)
    difference = np.abs(actual.reshape(70, ROWS) - wide @ values.T)
    assert (difference < limit).all()
    assert difference.max() > 1e-5, "factors are rounded"


def barriers(text: str) -> int:
    return text.count("workgroupBarrier()")


def test_kernels_for_features_save_barriers_and_shared_memory() -> None:
    emitter = Emitter()
    norm = NormSpec(2048, RmsNorm(1e-5), half=False)
    form = stored_as("q4s")
    spec = ProductSpec(2048, 2048, form, norm=norm, rounds_inputs=True, half_tiles=True)
    gemv = emitter.shaders[emitter.kernel(product.gemv, spec, 1)]
    assert [other.features for other in gemv.alternatives] == [(PACKED_PRODUCTS, SUBGROUPS)]
    packed, plain = emitter.texts[gemv.alternatives[0].file], emitter.texts[gemv.file]
    exact = emitter.shaders[emitter.kernel(product.gemv, replace(spec, rounds_inputs=False), 1)]
    assert [other.features for other in exact.alternatives] == [(SUBGROUPS,)]
    subgroups = emitter.texts[exact.alternatives[0].file]
    assert emitter.texts[exact.file] == plain.replace(gemv.entry, exact.entry)
    assert (barriers(plain), barriers(subgroups), barriers(packed)) == (16, 4, 4)
    # 32 columns of four rows of W: 128 products, or 32 of four each and 8 that add up x; norm and scales.
    assert (plain.count("fma("), packed.count("fma("), packed.count("dot4I8Packed(")) == (138, 10, 40)
    gemm = emitter.shaders[emitter.kernel(tile_product.gemm, spec)]
    (half,) = gemm.alternatives
    assert (half.features, half.shared_bytes, gemm.shared_bytes) == ((SHADER_F16,), 8192, 16384)
    assert gemm.best(FEATURES).file == half.file
    assert gemm.best([SUBGROUPS]).file == gemm.file
    rows = emitter.shaders[emitter.kernel(norm_rows.norm, norm)]
    assert [other.features for other in rows.alternatives] == [(SUBGROUPS,)]
