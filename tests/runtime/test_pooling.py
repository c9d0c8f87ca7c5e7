"""Tests of embeddings from hidden states: the mean and the last of them, in chunks of any size."""

from __future__ import annotations

import numpy as np
from mlcbuild_runtime.engine.pooling import Pooler, unit


def test_chunks_do_not_show_in_a_mean() -> None:
    rows = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32) * 1e3
    whole, parts = Pooler("mean"), Pooler("mean")
    whole.add(rows)
    for start in range(0, 300, 7):
        parts.add(rows[start : start + 7])
    assert np.array_equal(whole.vector(), parts.vector())
    exact = rows.astype(np.float64).mean(axis=0)
    assert np.array_equal(whole.vector(), unit(exact))
    parts.clear()
    parts.add(rows[:3])
    assert np.allclose(parts.vector(), unit(rows[:3].mean(axis=0)), atol=1e-6)


def test_nothing_has_no_direction() -> None:
    assert not unit(np.zeros(3)).any()


def test_the_last_state_is_that_of_the_last_chunk() -> None:
    pooler = Pooler("last")
    pooler.add(np.array([[9, 9], [1, 1]], np.float32))
    pooler.add(np.array([[5, 5], [3, -4]], np.float32))
    assert pooler.vector().dtype == np.float32 and np.allclose(pooler.vector(), [0.6, -0.8])
