"""The model family Qwen3 with experts: attention as in the dense model, and a softmax over all experts before
the choice."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import layers_by_step, mixed, read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, Family, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(common.attention, qk_norm=common.norm, qkv_bias=has_bias, output_bias=has_bias)
    fields.ignore(("max_window_layers", "sliding_window"))  # every layer has the window, or none
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    layers = windowed(LayerSpec(attention, common.feed_forward, Norms(common.norm)), [window] * common.count)
    router = Router(normalized=fields.flag("norm_topk_prob", False))
    experts = read_experts(fields, common, router, defaults=(128, 8, 768))
    sparse = layers_by_step(fields, common.count)
    return replace(common.model, layers=mixed(layers, sparse, experts, common.feed_forward))


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _read,
)
