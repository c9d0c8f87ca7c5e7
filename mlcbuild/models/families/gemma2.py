"""The model family Gemma 2: soft caps on attention scores and logits, attention windows in every other layer,
norms before and after attention and feed-forward."""

from __future__ import annotations

import math
from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules, layer_windows, windowed
from mlcbuild.models.fields import ABSENT, Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import LAYER_KINDS
from mlcbuild.models.rounding import ROUNDING, f32


def _read(fields: Fields, common: Common) -> ModelConfig:
    full, sliding = LAYER_KINDS
    has_bias = fields.flag("attention_bias", False)
    # The defaults are those of transformers for absent fields; null means no window and no cap.
    attention = replace(
        common.attention,
        qkv_bias=has_bias,
        output_bias=has_bias,
        scale=1 / math.sqrt(fields.number("query_pre_attn_scalar", 256.0, high=1e6)),
        softcap=fields.maybe_number("attn_logit_softcapping", 50.0),
    )
    norm = replace(common.norm, offset=1.0)
    layer = LayerSpec(attention, common.feed_forward, Norms(norm, norm))
    kinds = [full if i % 2 else sliding for i in range(common.count)]
    windows = layer_windows(fields, kinds, fields.maybe_integer("sliding_window", 4096))
    fields.ignore(("hidden_act",))  # transformers reads only hidden_activation
    # The scale is rounded to the checkpoint's dtype, whose field is `dtype` in transformers 5 and was
    # `torch_dtype` before.
    dtype = "torch_dtype" if fields.get("dtype") in (None, ABSENT) else "dtype"
    scale = fields.choice(dtype, ROUNDING, "float32")(f32(math.sqrt(common.model.hidden_size)))
    softcap = fields.maybe_number("final_logit_softcapping", 30.0)
    layers = windowed(layer, windows)
    return replace(common.model, layers=layers, norm=norm, embedding_scale=scale, logit_softcap=softcap)


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _read,
    config=ConfigRules(
        head_dim=256, tied=True, activation_field="hidden_activation", activation="gelu_pytorch_tanh"
    ),
    tensors=TensorRules(
        {
            "attn_post_norm.weight": ("post_attention_layernorm.weight",),
            "mlp_norm.weight": ("pre_feedforward_layernorm.weight",),
            "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
        }
    ),
)
