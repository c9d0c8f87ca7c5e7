"""Tests of the search for scales: weights that can be represented are kept exactly, the error is small, and
the embedded model loses little."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray

from mlcbuild.bundles.reference import logits
from mlcbuild.checkpoints.exact_weights import checkpoint
from mlcbuild.models import parsing
from mlcbuild.quant import Storage
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.search import SEARCHES, Search, fit
from mlcbuild.quant.search import TINY as SMALLEST
from tests.conftest import TINY
from tests.schemes import QUANTIZED, SCHEMES, normal, pack, unpack

FEW = pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits < 8], ids=lambda s: s.name)


@FEW
@pytest.mark.parametrize("extreme", [-1, 0, 1])
def test_weights_that_lie_on_the_levels_are_kept(scheme: Storage, extreme: int) -> None:
    """Checks that weights which are multiples of a scale are kept exactly, as in checkpoints that were
    trained for 4 bits or converted from other 4-bit formats."""
    rng, top = np.random.default_rng(5), 2 ** (scheme.bits - 1) - 1
    scale = rng.uniform(0.001, 0.01, (64, 4, 1)).astype(np.float16).astype(np.float32)
    levels = rng.integers(-top, top, (64, 4, 32), endpoint=extreme != 0).astype(np.float32)
    levels[:, :, 3] = {-1: -top - 1, 0: -top, 1: top}[extreme]
    weight = (levels * scale * rng.choice((1, -1), scale.shape)).astype(np.float32).reshape(64, 128)
    actual = unpack(pack(weight, scheme), scheme, weight.shape)
    np.testing.assert_allclose(actual, weight, rtol=0 if scheme.dtype == "float16" else 3e-7, atol=0)


@FEW
def test_weighted_error_of_few_bits(scheme: Storage) -> None:
    """Checks that the search for scales reaches a smaller error on gaussian weights, weighted by magnitude,
    than two plain scales of a group of 32. With 4 bits these are its weight of largest magnitude divided by
    -8, and its largest magnitude divided by 7; with 5 bits the divisors are -16 and 15."""
    top = 2 ** (scheme.bits - 1)
    weight = normal(64, 4096)
    groups = weight.reshape(-1, 32).astype(np.float64)
    extreme = groups[np.arange(len(groups)), np.abs(groups).argmax(1)][:, None]

    def errors(values: NDArray[np.floating]) -> NDArray[np.float64]:
        weighted: NDArray[np.float64] = (np.abs(groups) * (values - groups) ** 2).mean(1)
        return weighted

    def rounded(scale: NDArray[np.float64], least: int, most: int) -> NDArray[np.float64]:
        return errors(np.clip(np.rint(groups / scale), least, most) * scale)

    actual = errors(unpack(pack(weight, scheme), scheme, weight.shape).reshape(groups.shape)).mean()
    assert actual < {4: 0.86, 5: 0.9}[scheme.bits] * rounded(extreme / -top, -top, top - 1).mean()
    assert (
        actual
        < {4: 0.7, 5: 0.82}[scheme.bits] * rounded(np.abs(extreme) / (top - 1), 1 - top, top - 1).mean()
    )
    steps = np.arange(top - 2, top + 3, 0.05)
    finest = np.min([rounded(extreme / d, -top, top - 1) for d in (*-steps, *steps)], axis=0)
    assert actual < {4: 1.06, 5: 1.1}[scheme.bits] * finest.mean(), "an exhaustive search is hardly better"


def log_softmax(values: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return logs


@pytest.mark.parametrize("scheme", ["q4a8_1", "q5a8_1"])
def test_trained_weights_lose_less_than_with_scales_of_their_extremes(scheme: str) -> None:
    """Checks that the small model in recipes/models has a smaller KL divergence with the scales that the
    search chooses than with those of llama.cpp's Q4_0 and Q5_0. Those are a group's weight of largest
    magnitude divided by -8 (4 bits) or -16 (5 bits)."""
    storage = SCHEMES[scheme]
    config = parsing.parse(json.loads((TINY / "config.json").read_text()))
    exact = {
        name: np.asarray(value)
        for name, value in checkpoint(TINY, config, parsing.tensor_names(config)).items()
    }
    tokens = Tokenizer.load(TINY).encode((TINY / "heldout.jsonl").read_text())[:480]

    def divergence(rounded: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> float:
        values = {name: rounded(value) if value.ndim == 2 else value for name, value in exact.items()}
        p, q = (log_softmax(logits(config, weights, tokens)) for weights in (exact, values))
        return float((np.exp(p) * (p - q)).sum(axis=-1).mean())

    def plain(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        groups, top = weight.reshape(-1, 32), 2 ** (storage.bits - 1)
        extreme = groups[np.arange(len(groups)), np.abs(groups).argmax(1)][:, None]
        scale = (extreme / -top).astype(np.float16).astype(np.float32)
        whole: NDArray[np.float32] = (
            np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -top, top - 1) * scale
        )
        return whole.reshape(weight.shape)

    searched = divergence(lambda weight: unpack(pack(weight, storage), storage, weight.shape))
    assert searched < 0.9 * divergence(plain)


CONSTANTS = {4: (504, 8, (63, 72, 59), -7, 8), 5: (240, 16, (15, 16), -15, 16)}
"""Number of bits of a code -> the constants of the search for scales: (number of units to which a group's
extreme weight is scaled, divisor of a weight's importance, tried widths of a quantization step in units,
smallest code, largest code). They repeat the docstring of `fit` in mlcbuild/quant/search.py."""


def scale_of(group: NDArray[np.float32], extreme: np.float32, bits: int) -> np.float32:
    """Returns the scale of one group of 32 weights, computed plainly with Python's integers, to check the
    vectorized search for scales in `fit`. extreme: the group's weight of largest magnitude; bits: 4 or 5, the
    size of a code."""
    unit, divisor, steps, least, most = CONSTANTS[bits]
    factor = np.float32(unit) / extreme
    units = [int(np.rint(weight * factor)) for weight in group]
    best_gain, best = np.float32(-1), np.float32(0)
    for step in steps:
        codes = [min(max((u + step // 2) // step, least), most) for u in units]
        importance = [abs(u) // divisor for u in units]
        product = sum(v * u * c for v, u, c in zip(importance, units, codes, strict=True))
        square = sum(v * c * c for v, c in zip(importance, codes, strict=True))
        a = np.float32(product) / np.float32(max(square, 1))
        if a * np.float32(product) > best_gain:
            best_gain, best = a * np.float32(product), a
    return np.float32(extreme * (best / np.float32(unit)))


def fitted(search: Search, groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the scale that the code under test chooses for each group of 32 weights, float32 [n]. groups:
    the weights, float32 [n, 32]."""
    planes = np.ascontiguousarray(groups.reshape(-1, 8, 4).transpose(1, 0, 2)).reshape(8, -1)
    return fit(search, planes, extremes(groups), Scratch())


def extremes(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    largest: NDArray[np.float32] = groups[np.arange(len(groups)), np.abs(groups).argmax(1)]
    return largest


@pytest.mark.parametrize("bits", SEARCHES)
def test_scales_are_those_of_the_formula(bits: int) -> None:
    rng = np.random.default_rng(3)
    shapes = (rng.standard_normal((40, 32)), rng.uniform(-1, 1, (20, 32)), rng.standard_t(2, (20, 32)))
    groups = np.concatenate(shapes).astype(np.float32)
    groups[::7, 8:] = 0
    expected = [
        scale_of(group, extreme, bits) for group, extreme in zip(groups, extremes(groups), strict=True)
    ]
    np.testing.assert_array_equal(fitted(SEARCHES[bits], groups), np.array(expected))


@pytest.mark.parametrize("bits", SEARCHES)
def test_tiny_groups_count_as_zeros(bits: int) -> None:
    groups = np.zeros((3, 32), np.float32)
    groups[0, 5], groups[1, 5], groups[2, 5] = SMALLEST / 2, -2 * SMALLEST, 0
    zero, used, empty = fitted(SEARCHES[bits], groups)
    assert zero == empty == 0
    top = CONSTANTS[bits][-1]
    assert used in (-2 * SMALLEST / np.float32(top), -2 * SMALLEST / np.float32(top - 1))
