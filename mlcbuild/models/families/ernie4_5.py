"""The model family ERNIE 4.5 (dense): Llama whose rotary embedding rotates pairs of neighbouring
dimensions."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("use_bias", False)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    layer = replace(layer, feed_forward=replace(common.feed_forward, bias=has_bias))
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _read,
    RopeRules(theta=5e5, interleaved=True),
    config=ConfigRules(head_dim=128, tied=True, defaults={"rms_norm_eps": 1e-5}),
    remote_code=True,
)
