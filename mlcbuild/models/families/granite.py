"""The model family Granite 3 (dense): Llama with scalars on embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(
        qkv_bias=has_bias, output_bias=has_bias, scale=fields.number("attention_multiplier", 1.0)
    )
    feed_forward = replace(common.feed_forward, bias=fields.flag("mlp_bias", False))
    residual = fields.number("residual_multiplier", 1.0)
    layer = replace(layer, feed_forward=feed_forward, residual_scale=residual)
    return common.of(
        common.all_alike(fields, layer),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True, defaults={"rms_norm_eps": 1e-6}),
)
