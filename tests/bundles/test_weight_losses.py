"""Tests of measuring the loss that quantization causes: the prompts that are used, and the rounding of
activations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mlcbuild.bundles.weight_losses import open_trial, rounded_activations
from tests.budgets import PARAMS, inputs
from tests.schemes import SCHEMES

__all__ = ["inputs"]

pytestmark = pytest.mark.xdist_group("budget")  # so that one process measures the losses


def test_exact_weights_lose_nothing_and_few_tokens_leave_one_prompt(inputs: dict[str, Path]) -> None:
    trial = open_trial(PARAMS, inputs)
    prompts: list[None] = []
    assert trial.loss(SCHEMES["q0f32"], lambda: prompts.append(None)) < 1e-9
    assert len(prompts) == len(trial.prompts) == 2
    assert trial.within(1).prompts == trial.prompts[:1]
    assert trial.within(trial.tokens) == trial


def test_activations_are_rounded_in_groups() -> None:
    rows = np.random.default_rng(3).normal(size=(3, 70)).astype(np.float32)
    rows[1, 32:64] = 0
    eight, four = (rounded_activations(rows, SCHEMES[name]) for name in ("q8a8_1", "q4a8_1"))
    for row, actual, coarse in zip(rows, eight, four, strict=True):
        for start in (0, 32, 64):
            group = slice(start, start + 32)
            scale = float(np.abs(row[group]).max()) / 127
            assert np.abs(row[group] - actual[group]).max() <= scale * 0.5001
            power = 2.0 ** math.ceil(math.log2(scale)) if scale else 1.0
            assert np.array_equal(coarse[group], np.rint(row[group] / power) * power)
    assert rounded_activations(rows, SCHEMES["q4f16_1"]) is rows
