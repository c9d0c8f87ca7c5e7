"""Mistral: Llama without biases, with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import LAYER, Family, same_window
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    # 4096 is what an absent field means to transformers; null means no window.
    window = fields.maybe_integer("sliding_window", 4096)
    return replace(config, windows=same_window(config, fields, window))


FAMILY = Family("mistral", "MistralForCausalLM", _extend, LAYER, RopeRules())
