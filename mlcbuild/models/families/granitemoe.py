"""The model family Granite 3 with experts: scalars on embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family, Names, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms

NAMES: Names = {
    "mlp.router.weight": ("block_sparse_moe.router.layer.weight",),
    "mlp.experts.gate_up.weight": ("block_sparse_moe.input_linear.weight",),
    "mlp.experts.down.weight": ("block_sparse_moe.output_linear.weight",),
    "mlp.shared.gate_up.weight": ("shared_mlp.input_linear.weight",),
    "mlp.shared.down.weight": ("shared_mlp.output_linear.weight",),
}


def read(fields: Fields, common: Common, shared_size: int) -> ModelConfig:
    """Returns the model that a config.json of the family Granite with experts describes. fields: the reader
    of config.json, which collects error messages; common: what the fields that all families share describe;
    shared_size: number of hidden units of the feed-forward that every token uses beside its experts, or 0."""
    has_bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0)
    attention = replace(common.attention, qkv_bias=has_bias, output_bias=has_bias, scale=scale)
    experts = read_experts(fields, common, Router(), size="intermediate_size", defaults=(8, 2, None))
    experts = replace(experts, shared_size=shared_size)
    residual = fields.number("residual_multiplier", 1.0)
    layer = LayerSpec(attention, experts, Norms(common.norm), residual_scale=residual)
    return replace(
        common.model,
        layers=(layer,) * common.count,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    lambda fields, common: read(fields, common, 0),
    config=ConfigRules(kv_heads_optional=True),
    tensors=TensorRules(NAMES),
)
