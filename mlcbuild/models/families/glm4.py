"""The model family GLM-4-0414: GLM-4 with additional norms after the attention and the feed-forward of a
layer."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    layer = common.layer(qkv_bias=fields.flag("attention_bias", True))
    layer = replace(layer, norms=Norms(common.norm, common.norm))
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    _read,
    RopeRules(partial=0.5, interleaved=True),
    config=ConfigRules(head_dim=128, defaults={"rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2}),
    tensors=TensorRules(
        {
            "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",),
            "attn_post_norm.weight": ("post_self_attn_layernorm.weight",),
            "mlp_post_norm.weight": ("post_mlp_layernorm.weight",),
        }
    ),
)
