"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import LAYER, Family, layer_windows
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import LAYER_KINDS, RopeRules


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qkv_bias=True, windows=upper_windows(fields, config))


def upper_windows(fields: Fields, config: ModelConfig) -> tuple[int | None, ...]:
    """With use_sliding_window, layers from max_window_layers on see a window; without it none does, and
    the other two fields mean nothing."""
    fields.ignore(("sliding_window", "max_window_layers"))
    full, sliding = LAYER_KINDS
    if not fields.flag("use_sliding_window", False):
        return layer_windows(config, fields, [full] * config.num_layers, None)
    window = fields.integer("sliding_window")
    # Where layer_types lists every layer, transformers does not look at max_window_layers.
    first = config.num_layers if fields.has("layer_types") else fields.integer("max_window_layers", low=0)
    kinds = [sliding if i >= first else full for i in range(config.num_layers)]
    return layer_windows(config, fields, kinds, window)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _extend, LAYER, RopeRules())
