"""The model family GLM-4.5: partly rotated heads, dense layers first, experts that are chosen in groups by
sigmoid scores plus a correction.
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import grouped_router, layers_after, mixed, read_experts
from mlcbuild.models.family import Common, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    # Query, key and value have biases; the output product has none.
    attention = replace(
        common.attention,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=common.norm if fields.flag("use_qk_norm", False) else None,
    )
    # The ignored fields describe layers that predict further tokens.
    fields.ignore(("num_mtp_layers", "num_nextn_predict_layers"))
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    experts = read_experts(fields, common, grouped_router(fields, True), defaults=(128, 8, 1408))
    experts = replace(experts, shared_size=experts.size * fields.integer("n_shared_experts", 1, high=64))
    sparse = layers_after(fields, common.count, 1)
    layers = mixed((layer,) * common.count, sparse, experts, common.feed_forward)
    return replace(common.model, layers=layers)


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read,
    RopeRules(partial=0.5),
    tensors=TensorRules(unused=r"model\.layers\.{layers}\..*"),
)
