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
    """Checks that the search gives a smaller error on gaussian weights, weighted by magnitude, than the
    scales extreme / -8 or max|w| / 7 (with 5 bits extreme / -16 or max|w| / 15)."""
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
    """Checks that the embedded model's KL divergence is smaller than with the scales of llama.cpp's Q4_0 and
    Q5_0, extreme / -8 and extreme / -16."""
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
