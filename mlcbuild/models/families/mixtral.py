"""The model family Mixtral: Mistral with experts in every layer, weighted by a softmax over the chosen
ones."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family, Names, TensorRules, same_window, windowed
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules

NAMES: Names = {
    "mlp.router.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.gate_up.weight": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "mlp.experts.down.weight": ("block_sparse_moe.experts.{}.w2.weight",),
}


def _read(fields: Fields, common: Common) -> ModelConfig:
    window = fields.maybe_integer("sliding_window", None)
    fields.ignore(("router_jitter_noise",))  # for training only
    experts = read_experts(fields, common, Router(), size="intermediate_size", defaults=(8, 2, None))
    layer = LayerSpec(common.attention, experts, Norms(common.norm))
    return replace(common.model, layers=windowed(layer, same_window(fields, common.count, window)))


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    RopeRules(theta=1e6),
    config=ConfigRules(defaults={"num_key_value_heads": 8}),
    tensors=TensorRules(NAMES),
)
