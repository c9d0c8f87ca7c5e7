"""The model family Command R: attention and feed-forward of a layer read one LayerNorm, and the rotary
embedding rotates pairs of neighbouring dimensions."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias, has_norm = fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    layer = common.layer(
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=common.norm if has_norm else None,
        qk_norm_span="own_head" if has_norm else "head",
    )
    layer = replace(layer, residual="parallel_shared")
    scale = fields.number("logit_scale", 0.0625)
    return common.of(common.all_alike(fields, layer), logit_scale=scale)


FAMILY = Family(
    "cohere",
    "CohereForCausalLM",
    _read,
    RopeRules(theta=5e5, interleaved=True),
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        norm=LayerNorm(1.0, bias=False),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"layer_norm_eps": "rms_norm_eps"},
    ),
    tensors=TensorRules(
        {
            "attn.q_norm.weight": ("self_attn.q_norm.weight",),
            "attn.k_norm.weight": ("self_attn.k_norm.weight",),
        }
    ),
)
