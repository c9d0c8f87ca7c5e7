"""The model family Phi-3.5-MoE: LayerNorm, LongRoPE, and two experts chosen one after the other."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.families import mixtral
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules, same_window, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerNorm, LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(common.attention, qkv_bias=has_bias, output_bias=has_bias)
    router = Router("sparsemixer", jitter=fields.number("router_jitter_noise", 0.01))
    fields.ignore(("input_jitter_noise",))  # for training only
    experts = read_experts(fields, common, router, size="intermediate_size", defaults=(16, 2, None))
    window = fields.maybe_integer("sliding_window", None)
    layers = windowed(
        LayerSpec(attention, experts, Norms(common.norm)), same_window(fields, common.count, window)
    )
    return replace(common.model, layers=layers, head_bias=fields.flag("lm_head_bias", False))


FAMILY = Family(
    "phimoe",
    "PhimoeForCausalLM",
    _read,
    RopeRules(types=("default", "longrope"), theta=1e6, extensions=("mscale",)),
    config=ConfigRules(norm=LayerNorm(1.0), defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8}),
    tensors=TensorRules(mixtral.NAMES),
    remote_code=True,
)
