"""Qwen3 (dense): Qwen2 without its biases, with an RMSNorm on each query and key head."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families.qwen2 import upper_windows
from mlcbuild.models.family import LAYER, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        config,
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        windows=upper_windows(fields, config),
    )


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _extend, LAYER, RopeRules(), head_dim=128)
