"""The model family InternLM3: Llama, with biases in all matrix products of a layer or in none."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.families import llama
from mlcbuild.models.family import Common
from mlcbuild.models.fields import Fields


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    if has_bias != fields.flag("mlp_bias", False):
        fields.problem("mlp_bias", "must be equal to qkv_bias")
    return llama.FAMILY.read(fields, common)


FAMILY = replace(
    llama.FAMILY,
    config=replace(
        llama.FAMILY.config,
        head_dim=128,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 2},
        spellings={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    name="internlm3",
    architecture="InternLM3ForCausalLM",
    read=_read,
    remote_code=True,
)
