"""Helpers for tests of models: parts of configs, and configs with one change in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mlcbuild.models import Attention, LayerSpec, ModelConfig, Rope


def rope(dim: int, theta: float = 10000.0) -> Rope:
    """Returns the rotary embedding of `dim` dimensions without scaling, whose frequencies are theta ** (-2 *
    i / dim)."""
    return Rope(dim, tuple(float(np.float32(theta ** (-2 * i / dim))) for i in range(dim // 2)))


def attention_of(layer: LayerSpec) -> Attention:
    """Returns the attention block of a layer. Raises AssertionError for latent attention."""
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns a config in which the fields `changes` are replaced in the attention of every layer."""
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers)
    return replace(config, layers=layers)


def with_feed_forward(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns a config in which the fields `changes` are replaced in the feed-forward of every layer."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, **changes)) for layer in config.layers
    )
    return replace(config, layers=layers)


def with_windows(config: ModelConfig, *windows: int | None) -> ModelConfig:
    """Returns a config with one layer for each of `windows`; all are equal to its first layer except for the
    attention window."""
    layer = config.layers[0]
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for window in windows)
    return replace(config, layers=layers)


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """Returns the attention window of each layer in tokens; None for a layer without a window."""
    return tuple(layer.mixer.window for layer in config.layers)
