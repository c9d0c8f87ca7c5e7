"""Llama 2, 3 and 3.x, and every model that took over their shape and name (TinyLlama, SmolLM, Yi ...)."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import LAYER, Family, same_window
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        windows=same_window(config, fields, None),
    )


FAMILY = Family("llama", "LlamaForCausalLM", _extend, LAYER, RopeRules(), kv_heads_optional=True)
