"""The model family dots.llm1: attention of Qwen3, experts that are chosen in groups by sigmoid scores plus a
correction, dense layers first.
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import grouped_router, layers_after, mixed, read_experts
from mlcbuild.models.family import Common, ConfigRules, Family, layer_windows, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import LAYER_KINDS


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(common.attention, qk_norm=common.norm, qkv_bias=has_bias, output_bias=has_bias)
    full, sliding = LAYER_KINDS
    window, first = (
        fields.maybe_integer("sliding_window", 4096),
        fields.integer("max_window_layers", 62, low=0),
    )
    kinds = [full if window is None or index < first else sliding for index in range(common.count)]
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    layers = windowed(layer, layer_windows(fields, kinds, window))
    experts = read_experts(fields, common, grouped_router(fields, False), defaults=(None, None, 1408))
    experts = replace(experts, shared_size=experts.size * fields.integer("n_shared_experts", high=64))
    # transformers does not read these fields.
    fields.neutral({"moe_layer_freq": (1,), "scoring_func": ("noaux_tc", "sigmoid")}, "family 'dots1'")
    fields.neutral({"topk_method": ("noaux_tc",)}, "family 'dots1'")
    sparse = layers_after(fields, common.count, 0)
    return replace(common.model, layers=mixed(layers, sparse, experts, common.feed_forward))


FAMILY = Family(
    "dots1",
    "Dots1ForCausalLM",
    _read,
    config=ConfigRules(defaults={"num_key_value_heads": 32}),
)
