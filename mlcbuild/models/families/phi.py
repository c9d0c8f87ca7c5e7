"""The model family Phi-1, Phi-1.5 and Phi-2: attention and feed-forward of a layer read one LayerNorm; all
matrices but the embedding have biases."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    norm = common.norm if fields.flag("qk_layernorm", False) else None
    layer = common.layer(qkv_bias=True, output_bias=True, qk_norm=norm)
    feed_forward = replace(common.feed_forward, gated=False, bias=True)
    layer = replace(layer, feed_forward=feed_forward, residual="parallel_shared")
    return common.of(common.all_alike(fields, layer), head_bias=True)


FAMILY = Family(
    "phi",
    "PhiForCausalLM",
    _read,
    RopeRules(partial=0.5),
    config=ConfigRules(
        kv_heads_optional=True,
        activation="gelu_new",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"layer_norm_eps": "rms_norm_eps"},
    ),
    tensors=TensorRules(
        {
            "norm.weight": ("model.final_layernorm.weight",),
            "norm.bias": ("model.final_layernorm.bias",),
            "attn.q_norm.weight": ("self_attn.q_layernorm.weight",),
            "attn.q_norm.bias": ("self_attn.q_layernorm.bias",),
            "attn.k_norm.weight": ("self_attn.k_layernorm.weight",),
            "attn.k_norm.bias": ("self_attn.k_layernorm.bias",),
            "attn.o.weight": ("self_attn.dense.weight",),
            "attn.o.bias": ("self_attn.dense.bias",),
            "mlp.up.weight": ("mlp.fc1.weight",),
            "mlp.up.bias": ("mlp.fc1.bias",),
            "mlp.down.weight": ("mlp.fc2.weight",),
            "mlp.down.bias": ("mlp.fc2.bias",),
        }
    ),
)
