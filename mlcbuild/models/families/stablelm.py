"""The model family of StableLM 2 and StableLM 3B: LayerNorm, partly rotated heads; some models have parallel
residual connections with one norm, and a separate norm for each query and key head."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_norm = fields.flag("qk_layernorm", False)
    layer = common.layer(
        qkv_bias=fields.flag("use_qkv_bias", False),
        qk_norm=LayerNorm(common.norm.eps, bias=False) if has_norm else None,
        qk_norm_span="own_head" if has_norm else "head",
    )
    if fields.flag("use_parallel_residual", False):
        layer = replace(layer, residual="parallel_shared")
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "stablelm",
    "StableLmForCausalLM",
    _read,
    RopeRules(partial=0.25),
    config=ConfigRules(
        norm=LayerNorm(1.0), defaults={"rms_norm_eps": 1e-5}, spellings={"layer_norm_eps": "rms_norm_eps"}
    ),
    tensors=TensorRules(
        {
            "attn.q_norm.weight": ("self_attn.q_layernorm.norms.{}.weight",),
            "attn.k_norm.weight": ("self_attn.k_layernorm.norms.{}.weight",),
        }
    ),
    remote_code=True,
)
