"""The model family of GPT-NeoX and Pythia: parallel residual connections with a LayerNorm each for attention
and feed-forward, and query, key and value heads in one tensor."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    layer = replace(layer, feed_forward=replace(common.feed_forward, gated=False, bias=True))
    if fields.flag("use_parallel_residual", True):
        layer = replace(layer, residual="parallel")
    return common.of(common.all_alike(fields, layer))


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read,
    RopeRules(partial=0.25),
    config=ConfigRules(
        kv_heads_optional=True,
        activation="gelu",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
    ),
    tensors=TensorRules(
        {
            "embed.weight": ("gpt_neox.embed_in.weight",),
            "norm.weight": ("gpt_neox.final_layer_norm.weight",),
            "norm.bias": ("gpt_neox.final_layer_norm.bias",),
            "lm_head.weight": ("embed_out.weight",),
            "attn.qkv.weight": ("attention.query_key_value.weight",),
            "attn.qkv.bias": ("attention.query_key_value.bias",),
            "attn.o.weight": ("attention.dense.weight",),
            "attn.o.bias": ("attention.dense.bias",),
            "mlp.up.weight": ("mlp.dense_h_to_4h.weight",),
            "mlp.up.bias": ("mlp.dense_h_to_4h.bias",),
            "mlp.down.weight": ("mlp.dense_4h_to_h.weight",),
            "mlp.down.bias": ("mlp.dense_4h_to_h.bias",),
        },
        layers="gpt_neox.layers.",
        fused_heads=True,
        unused=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    ),
)
