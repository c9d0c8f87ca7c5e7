"""The model family AFM (Arcee): Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    feed_forward = replace(common.feed_forward, gated=False, bias=fields.flag("mlp_bias", False))
    return common.of(common.all_alike(fields, replace(layer, feed_forward=feed_forward)))


FAMILY = Family(
    "arcee",
    "ArceeForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True, activation="relu2", defaults={"rms_norm_eps": 1e-5}),
)
