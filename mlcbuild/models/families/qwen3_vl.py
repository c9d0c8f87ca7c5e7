"""The model family Qwen3-VL: Qwen3 beside a vision tower; only the text model is built. In text, the three
position numbers of its rotary embedding are equal."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(qk_norm=common.norm, qkv_bias=has_bias, output_bias=has_bias)
    return common.of(common.all_alike(fields, layer))


_TEXT = Family(
    "qwen3_vl_text",
    "Qwen3VLTextModel",
    _read,
    RopeRules(theta=5e5, ignored=("mrope_section", "mrope_interleaved")),
    config=ConfigRules(head_dim=128, defaults={"rms_norm_eps": 1e-6}),
)
FAMILY = replace(_TEXT, name="qwen3_vl", architecture="Qwen3VLForConditionalGeneration", texts=(_TEXT,))
