"""The model family Seed-OSS: Llama with biases on query, key and value."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    layer = common.layer(
        qkv_bias=fields.flag("attention_bias", True), output_bias=fields.flag("attention_out_bias", False)
    )
    feed_forward = replace(common.feed_forward, bias=fields.flag("mlp_bias", False))
    fields.ignore(("residual_dropout",))
    return common.of(common.all_alike(fields, replace(layer, feed_forward=feed_forward)))


FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    _read,
    config=ConfigRules(head_dim=128, defaults={"rms_norm_eps": 1e-6}),
)
