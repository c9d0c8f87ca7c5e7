"""InternLM3: Llama whose two switches of biases have names of their own."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, Family
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    feed_forward = replace(common.feed_forward, bias=fields.flag("mlp_bias", False))
    return common.of(common.all_alike(fields, replace(layer, feed_forward=feed_forward)))


FAMILY = Family(
    "internlm3",
    "InternLM3ForCausalLM",
    _read,
    head_dim=128,
    defaults={"rms_norm_eps": 1e-5},
    spellings={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    remote_code=True,
)
