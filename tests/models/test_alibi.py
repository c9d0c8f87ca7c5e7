"""Tests that compare the slopes of ALiBi with the formula of its paper."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mlcbuild.models.alibi import slopes


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 64])
def test_powers_of_two(heads: int) -> None:
    expected = [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
    np.testing.assert_allclose(slopes(heads, "exact"), expected, rtol=1e-6 * heads)


def test_other_counts_take_every_other_slope_of_twice_as_many() -> None:
    expected = [*(2 ** (-8 * i / 8) for i in range(1, 9)), *(2 ** (-8 * i / 16) for i in (1, 3, 5, 7))]
    np.testing.assert_allclose(slopes(12, "exact"), expected, rtol=1e-5)


def test_types() -> None:
    wide, narrow = slopes(12, "exact"), slopes(12, "bfloat16")
    assert narrow == tuple(np.array(wide, np.float32).astype(ml_dtypes.bfloat16).astype(float).tolist())
    assert narrow != wide
