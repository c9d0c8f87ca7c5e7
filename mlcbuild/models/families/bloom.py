"""The model family BLOOM: ALiBi instead of position embeddings, and a norm of the token embedding."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import KINDS, MEGATRON, Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm


def _read(fields: Fields, common: Common) -> ModelConfig:
    layer = common.layer(qkv_bias=True, output_bias=True, alibi="exact")
    feed_forward = replace(common.feed_forward, gated=False, bias=True)
    fields.neutral({"apply_residual_connection_post_layernorm": (False,)}, "family 'bloom'")
    fields.ignore(
        ("slow_but_exact", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "seq_length")
    )
    fields.ignore(("attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv", "n_inner"))
    layers = common.all_alike(fields, replace(layer, feed_forward=feed_forward))
    return common.of(layers, embedding_norm=common.norm)


FAMILY = Family(
    "bloom",
    "BloomForCausalLM",
    _read,
    None,
    config=ConfigRules(
        kv_heads_optional=True,
        tied=True,
        activation="gelu_pytorch_tanh",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        spellings={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embed": "hidden_size",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        wide=True,
    ),
    tensors=TensorRules(
        {
            "embed.weight": ("transformer.word_embeddings.weight",),
            **{f"embed_norm.{kind}": (f"transformer.word_embeddings_layernorm.{kind}",) for kind in KINDS},
            **{f"norm.{kind}": (f"transformer.ln_f.{kind}",) for kind in KINDS},
            **MEGATRON,
        },
        layers="transformer.h.",
        fused_heads=True,
    ),
)
