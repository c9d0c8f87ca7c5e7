"""The model family Apertus: a plain MLP of xIELU, and norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias, qk_norm=common.norm)
    layer = replace(layer, feed_forward=replace(common.feed_forward, gated=False))
    fields.ignore(("qk_norm", "post_norm"))
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    _read,
    RopeRules(theta=12e6),
    config=ConfigRules(
        kv_heads_optional=True,
        activation="xielu",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    tensors=TensorRules(
        {
            "attn_norm.weight": ("attention_layernorm.weight",),
            "mlp_norm.weight": ("feedforward_layernorm.weight",),
        }
    ),
)
