"""Tests of the inputs of one step of the model: tokens, rows of logits, and the places in the KV cache to
which a step writes."""

from __future__ import annotations

from mlcbuild_runtime.executor.batch import ModelStep


def test_a_step_says_where_tokens_go() -> None:
    step = ModelStep.of([([7, 8, 9], 18, [5, 2]), ([4], 1, [0])])
    assert step.tokens == [7, 8, 9, 4]
    assert step.indptr == [0, 3, 4]
    assert step.rows == [2, 3]
    assert step.places(16) == ([15, 16, 17, 0], [5 * 16 + 15, 2 * 16, 2 * 16 + 1, 0])
