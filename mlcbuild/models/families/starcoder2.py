"""The model family StarCoder2: LayerNorm, a feed-forward without a gate, biases in all matrix products of a
layer, and one attention window for all layers or none."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("use_bias", True)
    layer = common.layer(qkv_bias=has_bias, output_bias=has_bias)
    layer = replace(layer, feed_forward=replace(common.feed_forward, gated=False, bias=has_bias))
    window = fields.maybe_integer("sliding_window", None)
    fields.ignore(("residual_dropout", "embedding_dropout", "norm_type", "mlp_type"))
    # Published checkpoints have fields of StarCoder, which transformers does not read for StarCoder2.
    fields.ignore(("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"))
    fields.ignore(("scale_attention_softmax_in_fp32", "scale_attn_weights"))
    return common.of(common.all_alike(fields, layer, window))


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _read,
    config=ConfigRules(
        tied=True,
        activation="gelu_pytorch_tanh",
        norm=LayerNorm(1.0),
        defaults={"rms_norm_eps": 1e-5},
        spellings={"norm_epsilon": "rms_norm_eps"},
    ),
    tensors=TensorRules(
        {
            "mlp.up.weight": ("mlp.c_fc.weight",),
            "mlp.up.bias": ("mlp.c_fc.bias",),
            "mlp.down.weight": ("mlp.c_proj.weight",),
            "mlp.down.bias": ("mlp.c_proj.bias",),
        }
    ),
)
