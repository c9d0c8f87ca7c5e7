"""The model family OLMo: LayerNorms without weights and biases, and queries, keys and values that may be
clipped to a limit."""

from __future__ import annotations

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    clip = fields.maybe_number("clip_qkv", None)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias, clip=clip)
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "olmo",
    "OlmoForCausalLM",
    _read,
    config=ConfigRules(
        kv_heads_optional=True, norm=LayerNorm(1.0, weight=False, bias=False), defaults={"rms_norm_eps": 1e-5}
    ),
)
