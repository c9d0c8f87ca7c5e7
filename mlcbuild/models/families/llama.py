"""The model family of Llama 2, 3 and 3.x, and of all models with the same shape and model_type (TinyLlama,
SmolLM, Yi ...).
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, same_window, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(common.attention, qkv_bias=has_bias, output_bias=has_bias)
    feed_forward = replace(common.feed_forward, bias=fields.flag("mlp_bias", False))
    layer = LayerSpec(attention, feed_forward, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, same_window(fields, common.count, None)))


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True),
)
