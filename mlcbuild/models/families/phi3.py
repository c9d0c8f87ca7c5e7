"""Phi-3, Phi-3.5 and Phi-4 (dense, text): fused projections, LongRoPE, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.family import LAYER, Family, same_window
from mlcbuild.models.fields import Fields
from mlcbuild.models.rope import RopeRules


def _extend(fields: Fields, config: ModelConfig) -> ModelConfig:
    window = fields.maybe_integer("sliding_window", None)
    return replace(config, windows=same_window(config, fields, window))


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _extend,
    {
        **LAYER,
        "attn.qkv.weight": ("self_attn.qkv_proj.weight",),
        "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",),
    },
    # Early checkpoints call LongRoPE by the names of its predecessors.
    RopeRules(
        partial=True,
        types=("default", "longrope"),
        aliases={"su": "longrope", "yarn": "longrope"},
        original_max_position=4096,
    ),
    kv_heads_optional=True,
    remote_code=True,
)
