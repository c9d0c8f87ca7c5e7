"""The model family Phi-3, Phi-3.5 and Phi-4 (dense, text): fused projections; some models have LongRoPE and
partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules, same_window, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    window = fields.maybe_integer("sliding_window", None)
    layer = LayerSpec(common.attention, common.feed_forward, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, same_window(fields, common.count, window)))


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    RopeRules(
        partial=1.0,
        types=("default", "longrope"),
        aliases={"su": "longrope", "yarn": "longrope"},
        original_max_position=4096,
    ),
    config=ConfigRules(kv_heads_optional=True),
    tensors=TensorRules(
        {
            "attn.qkv.weight": ("self_attn.qkv_proj.weight",),
            "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",),
        }
    ),
    remote_code=True,
)
