"""Tests of experts in the NumPy forward pass: logits are compared with those of transformers, and the choices
of routers with their rules."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.bundles import reference
from mlcbuild.bundles.reference import EMPTY, Reference, head, hidden
from mlcbuild.bundles.reference_experts import route
from mlcbuild.models import Router
from tests.configs import with_attention
from tests.experts_golden import VARIANTS, golden


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str) -> None:
    model = golden(variant)
    for dtype in (np.float32, np.float64):
        logits = reference.logits(model.config, model.weights, model.tokens, dtype=dtype)
        assert logits.dtype == dtype
        assert np.abs(logits - model.logits).max() < model.tolerance / 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_with_a_cache_give_what_the_whole_gives(variant: str) -> None:
    model = golden(variant)
    whole = Reference(model.config, model.weights, np.float64)
    past, start = EMPTY, 0
    expected = reference.logits(model.config, model.weights, model.tokens, dtype=np.float64)
    for count in (17, 1, 1, 26):
        states, past = hidden(whole, model.tokens[start : start + count], past)
        assert np.abs(head(whole, states) - expected[start : start + count]).max() < 1e-12
        start += count


def test_limits_after_norms_of_queries_and_keys_show_in_their_golden() -> None:
    model = golden("olmoe-clip")
    unlimited = with_attention(model.config, clip=None)
    logits = reference.logits(unlimited, model.weights, model.tokens, dtype=np.float64)
    assert np.abs(logits - model.logits).max() > 100 * model.tolerance


def test_of_equal_scores_the_lowest_index_is_chosen() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for router in (Router(), Router("sigmoid")):
        chosen, weights = route(router, 2, logits, None)
        assert chosen.tolist() == [[1, 2], [0, 1]]
        assert np.allclose(weights, 0.5)


def test_normalized_softmax_is_the_softmax_of_the_chosen_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((9, 12)) * 3
    chosen, weights = route(Router(), 4, logits, None)
    best = np.sort(logits, axis=-1)[:, :-5:-1]
    shares = np.exp(best - best[:, :1])
    assert np.allclose(weights, shares / shares.sum(-1, keepdims=True))
    assert np.array_equal(np.take_along_axis(logits, chosen, -1), best)


def test_a_correction_changes_choices_and_not_weights() -> None:
    logits = np.array([[0.0, 1.0, 2.0]])
    router = Router("sigmoid", normalized=False, correction=True, scale=2.5)
    chosen, weights = route(router, 1, logits, np.array([9.0, 0.0, 0.0]))
    assert chosen.tolist() == [[0]]
    assert np.allclose(weights, 2.5 * 0.5)


def test_choices_stay_inside_the_best_groups() -> None:
    # The largest score is in the first group, but the two largest of the second one sum up to more.
    logits = np.array([[4.0, -4.0, 2.0, 2.0, -4.0, -4.0]])
    chosen, _ = route(Router("sigmoid", groups=3), 2, logits, None)
    assert chosen.tolist() == [[2, 3]]
