"""Gemma 2: soft caps, every other layer with a window, norms before and after each half of a layer."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import LAYER, Family, layer_windows
from mlcbuild.models.fields import ABSENT, Fields
from mlcbuild.models.rope import LAYER_KINDS, RopeRules
from mlcbuild.models.rotary import f32


def _float16(value: float) -> float:
    rounded: float = struct.unpack("<e", struct.pack("<e", value))[0]
    return rounded


def _bfloat16(value: float) -> float:
    """The upper half of the float32, rounded to nearest, ties to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + ((bits >> 16) & 1)
    rounded: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]
    return rounded


_ROUNDING: Mapping[str, Callable[[float], float]] = {
    "float32": f32,
    "float16": _float16,
    "bfloat16": _bfloat16,
}


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    full, sliding = LAYER_KINDS
    attention_bias = fields.flag("attention_bias", False)
    scalar = fields.number("query_pre_attn_scalar", 256.0, high=1e6)
    # The defaults are what an absent field means to transformers; null means none.
    window = fields.maybe_integer("sliding_window", 4096)
    alternating = [full if i % 2 else sliding for i in range(config.num_layers)]
    fields.ignore(("hidden_act",))  # transformers goes by hidden_activation alone
    return replace(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=_rounding(fields)(f32(math.sqrt(config.hidden_size))),
        attention_scale=1 / math.sqrt(scalar),
        attention_softcap=fields.maybe_number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.maybe_number("final_logit_softcapping", 30.0),
        windows=layer_windows(config, fields, alternating, window),
    )


def _rounding(fields: Fields) -> Callable[[float], float]:
    """The checkpoint's own dtype; transformers 5 calls the field `dtype`, before it was `torch_dtype`."""
    name = "torch_dtype" if fields.get("dtype") in (None, ABSENT) else "dtype"
    return fields.choice(name, _ROUNDING, "float32")


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _extend,
    {
        **LAYER,
        "attn_post_norm.weight": ("post_attention_layernorm.weight",),
        "mlp_norm.weight": ("pre_feedforward_layernorm.weight",),
        "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
    },
    RopeRules(),
    head_dim=256,
    tied=True,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
)
