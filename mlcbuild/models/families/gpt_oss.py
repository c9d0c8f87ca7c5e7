"""The model family gpt-oss: experts with biases and a clamped gate, attention sinks, and an attention window
in every other layer."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Clamp, Router
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules, layer_windows, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import LAYER_KINDS, RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    attention = replace(common.attention, qkv_bias=has_bias, output_bias=has_bias, sinks=True)
    if not (fields.has("rope_scaling") or fields.has("rope_parameters")):
        fields.problem("rope_scaling", "missing; give the scaling that the model was trained with")
    experts = read_experts(fields, common, Router(bias=True), size="intermediate_size")
    fields.neutral({"experts_per_token": (None, experts.chosen)}, "family 'gpt_oss'")
    fields.ignore(("initial_context_length",))  # original_max_position_embeddings of the rope is read instead
    clamp = Clamp(fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702))
    experts = replace(experts, bias=True, clamp=clamp)
    full, sliding = LAYER_KINDS
    kinds = [full if index % 2 else sliding for index in range(common.count)]
    windows = layer_windows(fields, kinds, fields.maybe_integer("sliding_window", 128))
    layer = LayerSpec(attention, experts, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, windows))


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
    RopeRules(theta=150000.0),
    config=ConfigRules(
        head_dim=64,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
    tensors=TensorRules(
        {
            "mlp.router.weight": ("mlp.router.weight",),
            "mlp.router.bias": ("mlp.router.bias",),
            "mlp.experts.gate_up.weight": ("mlp.experts.gate_up_proj",),
            "mlp.experts.gate_up.bias": ("mlp.experts.gate_up_proj_bias",),
            "mlp.experts.down.weight": ("mlp.experts.down_proj",),
            "mlp.experts.down.bias": ("mlp.experts.down_proj_bias",),
        },
        transposed=("mlp.experts.gate_up.weight", "mlp.experts.down.weight"),
        alternating=True,
    ),
)
