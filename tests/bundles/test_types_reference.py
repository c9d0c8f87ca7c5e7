"""Tests that the NumPy forward pass gives the logits of transformers for each model type, with checkpoints
read from files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlcbuild.bundles import reference
from mlcbuild.bundles.reference import EMPTY, Reference, head, hidden
from mlcbuild.models import Experts, ModelConfig, Router
from tests import typegoldens
from tests.configs import with_attention, with_feed_forward, with_windows


@pytest.mark.parametrize("name", typegoldens.NAMES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = typegoldens.load(name, tmp_path)
    logits = reference.logits(case.config, case.weights, case.tokens, dtype=np.float64)
    span = np.abs(case.logits).max()
    assert np.abs(logits - case.logits).max() < 3e-6 * span
    model = Reference(case.config, case.weights, np.float64)
    first, past = hidden(model, case.tokens[:19])
    second, _ = hidden(model, case.tokens[19:], past)
    pieces = np.concatenate([head(model, first), head(model, second)])
    assert past.length == 19 and EMPTY.length == 0
    assert np.abs(pieces - logits).max() < 1e-9 * span


def with_layers(**changes: object) -> Callable[[ModelConfig], ModelConfig]:
    """Returns a function that replaces the fields `changes` in every layer of a config."""
    return lambda config: replace(
        config,
        layers=tuple(replace(layer, **changes) for layer in config.layers),  # type: ignore[arg-type]
    )


def experts_of(config: ModelConfig) -> Experts:
    """Returns the feed-forward with experts of a config's last layer."""
    experts = config.layers[-1].feed_forward
    assert isinstance(experts, Experts)
    return experts


def with_experts(config: ModelConfig, **changes: object) -> ModelConfig:
    """Returns a model config that equals `config` except that the fields `changes` are replaced in every
    feed-forward with experts."""
    experts = replace(experts_of(config), **changes)  # type: ignore[arg-type]
    layers = tuple(
        replace(layer, feed_forward=experts) if isinstance(layer.feed_forward, Experts) else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)


MUTATIONS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "gemma3_text rope": lambda c: with_attention(c, rope=0),
    "gemma3_text windows": lambda c: with_windows(c, None, None, None),
    "smollm3 rope": lambda c: with_attention(c, rope=0),
    "ministral3 query_scale": lambda c: replace(c, ropes=(replace(c.ropes[0], query_scale=None),)),
    "olmo clip": lambda c: with_attention(c, clip=None),
    "granite residual_scale": with_layers(residual_scale=1.0),
    "granite logit_scale": lambda c: replace(c, logit_scale=1.0),
    "hunyuan_v1_dense norm after rotation": lambda c: with_attention(c, qk_norm_last=False),
    "gpt_neox activation": lambda c: with_feed_forward(c, activation="gelu_tanh"),
    "gpt_oss sinks": lambda c: with_attention(c, sinks=False),
    "gpt_oss windows": lambda c: with_windows(c, None, None, None),
    "gpt_oss clamp": lambda c: with_feed_forward(c, clamp=None),
    "gpt_oss router bias": lambda c: with_feed_forward(c, router=Router()),
    "deepseek_v2 groups": lambda c: with_experts(
        c, router=replace(experts_of(c).router, group_by_largest=False)
    ),
    "deepseek_v3 scale": lambda c: with_attention(c, scale=(10 + 6) ** -0.5),
    "deepseek_v3 eps": lambda c: with_attention(c, eps=1e-2),
    "gpt2 scales": lambda c: with_attention(c, scale=c.layers[0].mixer.scale),
    "opt position_offset": lambda c: replace(c, position_offset=0),
    "bloom alibi": lambda c: with_attention(c, alibi=None),
    "falcon-alibi alibi": lambda c: with_attention(c, alibi="exact"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_option_shows_in_its_golden(mutation: str, tmp_path: Path) -> None:
    """Checks that changing one option of a model type's test config changes the logits that NumPy computes.
    The stored logits of transformers would therefore reveal an option that is not computed."""
    case = typegoldens.load(mutation.split(maxsplit=1)[0], tmp_path)
    logits = reference.logits(MUTATIONS[mutation](case.config), case.weights, case.tokens, dtype=np.float64)
    assert np.abs(logits - case.logits).max() > 1e-4 * np.abs(case.logits).max()
