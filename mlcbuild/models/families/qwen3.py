"""The model family Qwen3 (dense): Qwen2 without its biases, with an RMSNorm on each query and key head."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families.qwen2 import upper_windows
from mlcbuild.models.family import Common, ConfigRules, Family, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(common.attention, qk_norm=common.norm, qkv_bias=has_bias, output_bias=has_bias)
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, upper_windows(fields, common.count)))


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read,
    config=ConfigRules(head_dim=128),
)
