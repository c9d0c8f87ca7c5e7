"""Tests of widening and rounding floating-point weights, and of reusing scratch memory."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import floats
from mlcbuild.quant.floats import Scratch
from tests.schemes import normal


def test_widening_is_exact_for_every_half() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    halves = patterns.view(np.float16)
    out = np.empty(halves.shape, np.float32)
    finite = np.isfinite(halves)
    for part in (halves, halves[finite], halves[np.abs(halves) < 1e-4]):
        floats.widen(part, out[: part.size])
        assert np.array_equal(out[: part.size], part.astype(np.float32), equal_nan=True)
    signs = out[:1].copy()
    floats.widen(np.array([-0.0], np.float16), signs)
    assert np.signbit(signs[0])
    brain = np.empty(1 << 16, np.float32)
    floats.widen(patterns, brain)
    assert np.array_equal(brain.view(np.uint32), patterns.astype(np.uint32) << 16)


def test_a_tensor_of_the_dtype_is_not_copied() -> None:
    raw = normal(3, 5)
    assert floats.narrow(raw, "float32", Scratch(), "a") is raw


@pytest.mark.parametrize("block", [7, floats.BLOCK])
def test_rounding_to_half_is_that_of_numpy(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floats, "BLOCK", block)
    raw = normal(20, 30) * np.float32(1e-3)
    assert floats.narrow(raw, "float16", Scratch(), "a").tobytes() == raw.astype(np.float16).tobytes()
    brain = (raw.view(np.uint32) >> 16).astype(np.uint16)
    exact = (brain.astype(np.uint32) << 16).view(np.float32)
    assert floats.narrow(brain, "float32", Scratch(), "a").tobytes() == exact.tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.inf, "^norm: it holds infinite or NaN weights, which no format can store; repair the checkpoint"),
        (np.nan, "^norm: it holds infinite or NaN weights"),
        (
            -65520.0,
            "^norm: it holds 65520, beyond the largest float16, 65504; store this parameter in",
        ),
    ],
)
def test_what_half_cannot_hold_is_refused(value: float, message: str) -> None:
    raw = normal(4, 5)
    raw[3, 2] = value
    with pytest.raises(CheckpointError, match=message):
        floats.narrow(raw, "float16", Scratch(), "norm")


def test_memory_of_one_use_grows_and_is_used_again() -> None:
    scratch = Scratch()
    first = scratch.array("a", (4, 4), np.float32)
    other = scratch.array("b", (4, 4), np.float32)
    assert np.shares_memory(first, scratch.array("a", (2, 8), np.uint16))
    assert not np.shares_memory(first, other)
    larger = scratch.array("a", (5, 4), np.float32)
    assert larger.shape == (5, 4) and not np.shares_memory(first, larger)
