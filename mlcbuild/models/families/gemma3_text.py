"""The model family Gemma 3 (text): most layers have an attention window and another rotary embedding."""

from __future__ import annotations

import math
from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import (
    POST_NORMS,
    Common,
    ConfigRules,
    Family,
    TensorRules,
    every,
    layer_windows,
    scaled_embedding,
)
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import Norms, RmsNorm
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    layer = common.layer(
        qkv_bias=has_bias,
        output_bias=has_bias,
        scale=1 / math.sqrt(fields.number("query_pre_attn_scalar", 256.0, high=1e6)),
        softcap=fields.maybe_number("attn_logit_softcapping", None),
        qk_norm=common.norm,
    )
    layer = replace(layer, norms=Norms(common.norm, common.norm))
    kinds = every(fields.integer("sliding_window_pattern", 6), common.count)
    windows = layer_windows(fields, kinds, fields.maybe_integer("sliding_window", 4096))
    return common.of(
        common.by_kind(layer, windows),
        embedding_scale=scaled_embedding(fields, common.model.hidden_size),
        logit_softcap=fields.maybe_number("final_logit_softcapping", None),
    )


_DEFAULTS: dict[str, object] = {"num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216}
_DEFAULTS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
_DEFAULTS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6}

FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    RopeRules(by_kind=True, theta=1e6, local_theta=1e4),
    config=ConfigRules(
        tied=True,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        norm=RmsNorm(1.0, offset=1.0),
        defaults=_DEFAULTS,
    ),
    tensors=TensorRules(POST_NORMS),
)
