"""Tests that compare rounding to the number types of checkpoints with NumPy and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from mlcbuild.models.rounding import ROUNDING

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
VALUES = [0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 2**-24, 2**-25, 65504.0, 1e-40, math.pi, 1 / 3]


@pytest.mark.parametrize("name", ROUNDING)
def test_numbers_are_rounded_to_the_nearest_ties_to_even(name: str) -> None:
    drawn = np.random.default_rng(1).normal(0, 1000, 200).astype(np.float32).tolist()
    for value in [*VALUES, *(-value for value in VALUES), *drawn]:
        # ml_dtypes rounds a double twice, so that both sides begin from a float32.
        start = float(np.float32(value)) if name == "bfloat16" else value
        assert ROUNDING[name](start) == float(np.array(start).astype(TYPES[name])), start
