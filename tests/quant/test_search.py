"""The search for scales: weights on a grid are kept, and an exhaustive search is hardly better."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.quant import Storage
from tests.schemes import QUANTIZED, normal, pack, unpack

FEW = pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits < 8], ids=lambda s: s.name)


@FEW
@pytest.mark.parametrize("extreme", [-1, 0, 1])
def test_weights_that_lie_on_the_levels_are_kept(scheme: Storage, extreme: int) -> None:
    """Checkpoints that were trained for 4 bits, or come from other 4-bit formats, have such weights."""
    rng, top = np.random.default_rng(5), 2 ** (scheme.bits - 1) - 1
    scale = rng.uniform(0.001, 0.01, (64, 4, 1)).astype(np.float16).astype(np.float32)
    levels = rng.integers(-top, top, (64, 4, 32), endpoint=extreme != 0).astype(np.float32)
    levels[:, :, 3] = {-1: -top - 1, 0: -top, 1: top}[extreme]
    weight = (levels * scale * rng.choice((1, -1), scale.shape)).astype(np.float32).reshape(64, 128)
    actual = unpack(pack(weight, scheme), scheme, weight.shape)
    np.testing.assert_allclose(actual, weight, rtol=0 if scheme.dtype == "float16" else 3e-7, atol=0)


@FEW
def test_squared_error_of_few_bits(scheme: Storage) -> None:
    """On gaussian weights, next to what scales of extreme / -8 or of max|w| / 7 leave; 5 bits: 16, 15."""
    top = 2 ** (scheme.bits - 1)
    weight = normal(64, 4096)
    groups = weight.reshape(-1, 32).astype(np.float64)
    extreme = groups[np.arange(len(groups)), np.abs(groups).argmax(1)][:, None]

    def error(scale: NDArray[np.float64], least: int, most: int) -> float:
        return float(((np.clip(np.rint(groups / scale), least, most) * scale - groups) ** 2).mean())

    actual = float(((unpack(pack(weight, scheme), scheme, weight.shape) - weight) ** 2).mean())
    assert actual < {4: 0.915, 5: 0.925}[scheme.bits] * error(extreme / -top, -top, top - 1)
    assert actual < {4: 0.72, 5: 0.82}[scheme.bits] * error(np.abs(extreme) / (top - 1), 1 - top, top - 1)
    steps = np.arange(top - 2, top + 3, 0.05)
    finest = np.min(
        [
            ((np.clip(np.rint(groups / s), -top, top - 1) * s - groups) ** 2).mean(1)
            for s in (extreme / d for d in (*-steps, *steps))
        ],
        axis=0,
    )
    assert actual < {4: 1.04, 5: 1.1}[scheme.bits] * finest.mean(), "an exhaustive search is hardly better"
