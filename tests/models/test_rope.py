"""Tests of rotary embeddings as checkpoints describe them: two notations, per kind of layer, and faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import QueryScale, Rope
from mlcbuild.models.rope import LAYER_KINDS, RopeRules, read_ropes

FULL, SLIDING = LAYER_KINDS


def ropes(rules: RopeRules | None = None, dim: int = 8, **values: Any) -> tuple[dict[str, Rope], list[str]]:
    """Parses the fields `values` of a config.json. Returns (kind of layer -> its rotary embedding; error
    messages about the fields). rules: how the model family states them; dim: number of rotated dimensions of
    a head."""
    fields = Fields("config.json", values)
    resolved = read_ropes(fields, dim, 4096, rules or RopeRules())
    return resolved, fields.problems


def powers(theta: float, dim: int) -> Any:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def test_without_scaling_frequencies_are_powers_of_theta() -> None:
    for theta in (10000.0, 1e6):
        resolved, problems = ropes(rope_theta=theta)
        assert not problems and resolved[FULL] == resolved[SLIDING] and resolved[FULL].dim == 8
        np.testing.assert_allclose(resolved[FULL].inv_freq, powers(theta, 8), rtol=2e-7)
    assert ropes()[0] == ropes(rope_theta=10000.0)[0]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
    ],
)
def test_both_notations_mean_the_same(scaling: dict[str, Any]) -> None:
    old = ropes(rope_theta=5e5, rope_scaling=scaling)
    older = ropes(
        rope_theta=5e5, rope_scaling={"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    )
    new = ropes(rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == older == new and not old[1]
    assert old[0] != ropes(rope_theta=5e5)[0]


def test_linear_scaling_divides_and_longrope_has_two_lists() -> None:
    plain = np.array(ropes()[0][FULL].inv_freq)
    linear = ropes(rope_scaling={"type": "linear", "factor": 4.0})[0][FULL]
    np.testing.assert_allclose(np.array(linear.inv_freq) * 4, plain, rtol=2e-7)
    both = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    long = ropes(rope_scaling=both, original_max_position_embeddings=1024)[0][FULL]
    np.testing.assert_allclose(long.inv_freq, plain, rtol=2e-7)
    np.testing.assert_allclose(np.array(long.inv_freq_long) * [2, 3, 4, 5], plain, rtol=2e-7)
    expected = np.sqrt(1 + np.log(4096 / 1024) / np.log(1024))
    assert long.attention_factor == pytest.approx(expected, rel=1e-6)


def test_layers_with_a_window_may_have_another() -> None:
    rules = RopeRules(by_kind=True, local_theta=10000.0)
    resolved, problems = ropes(rules, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 8.0})
    assert not problems
    np.testing.assert_allclose(resolved[SLIDING].inv_freq, powers(10000.0, 8), rtol=2e-7)
    np.testing.assert_allclose(np.array(resolved[FULL].inv_freq) * 8, powers(1e6, 8), rtol=2e-7)
    nested = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 500.0}}
    resolved, problems = ropes(rules, rope_parameters=nested)
    np.testing.assert_allclose(resolved[SLIDING].inv_freq, powers(500.0, 8), rtol=2e-7)
    _, problems = ropes(rope_parameters=nested)
    assert "one rotary embedding must serve all layers" in problems[0]


def test_a_part_of_a_head_may_be_rotated() -> None:
    half = RopeRules(partial=0.5)
    assert ropes(half)[0][FULL].dim == 4
    assert ropes(half, partial_rotary_factor=0.25)[0][FULL].dim == 2
    assert ropes(RopeRules(rotary_dim=True), rotary_dim=6)[0][FULL].dim == 6
    cases: list[tuple[RopeRules, dict[str, Any], str]] = [
        (RopeRules(), {"partial_rotary_factor": 0.5}, "this family rotates whole heads (1.0), found 0.5"),
        (half, {"partial_rotary_factor": 0.4}, "3 of 8 dimensions of a head would be rotated"),
    ]
    for rules, fields, words in cases:
        assert words in ropes(rules, **fields)[1][0]


def test_what_only_some_families_have() -> None:
    dynamic = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    alpha = ropes(RopeRules(extensions=("alpha",)), rope_scaling=dynamic)
    np.testing.assert_allclose(alpha[0][FULL].inv_freq, powers(1e4 * 1000 ** (8 / 6), 8), rtol=2e-7)
    yarn = {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "llama_4_scaling_beta": 0.1,
    }
    scaled = ropes(RopeRules(extensions=("beta",)), rope_scaling=yarn)[0][FULL]
    assert scaled.query_scale == QueryScale(0.1, 512)
    assert "llama_4_scaling_beta" in ropes(rope_scaling=yarn)[1][0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "keys already in the cache would be wrong"),
        ({"rope_scaling": {"type": "yarm", "factor": 2.0}}, "'yarm' is not supported; did you mean 'yarn'?"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "says linear, but rope_type says yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be at least 1, found 0.5"),
        ({"rope_scaling": [1]}, "must be an object or null"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "beside the other fields it is 5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "strange": 1}}, "strange"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
         "must be above low_freq_factor 4"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
    ],
)  # fmt: skip
def test_faults_are_named(fields: dict[str, Any], words: str) -> None:
    assert words in "\n".join(ropes(**fields)[1])


def test_an_alpha_near_zero_is_refused() -> None:
    dynamic = {"type": "dynamic", "factor": 1.0, "alpha": 1e-308}
    problems = ropes(RopeRules(extensions=("alpha",)), rope_scaling=dynamic)[1]
    assert "alpha: must be a number above 1e-06" in "\n".join(problems)
