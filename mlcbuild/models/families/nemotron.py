"""The model family Nemotron 4 and Minitron: LayerNorm whose weights are differences from 1, squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    feed_forward = replace(common.feed_forward, gated=False, bias=fields.flag("mlp_bias", False))
    return common.of(common.all_alike(fields, replace(layer, feed_forward=feed_forward)))


FAMILY = Family(
    "nemotron",
    "NemotronForCausalLM",
    _read,
    RopeRules(partial=0.5),
    config=ConfigRules(
        kv_heads_optional=True,
        activation="relu2",
        norm=LayerNorm(1.0, offset=1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"norm_eps": "rms_norm_eps", "rope_percent": "partial_rotary_factor"},
    ),
)
