"""The model family ERNIE 4.5 with experts: interleaved rotary embedding, and experts that are chosen by
softmax scores plus a correction.
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import mixed, read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    # The fields balance experts in training; weights are never divided by a sum as small as the limit.
    fields.ignore(("moe_capacity", "moe_use_aux_free"))
    fields.number("moe_norm_min", 1e-12, high=1e-6)
    fields.neutral({"use_bias": (False,), "moe_gate": ("topk",)}, "family 'ernie4_5_moe'")
    router = Router(correction=True)
    experts = read_experts(fields, common, router, defaults=(64, 6, 1536))
    shared = fields.integer("moe_num_shared_experts", 2, low=0, high=64)
    experts = replace(experts, shared_size=experts.size * shared)
    first, step = (
        fields.integer("moe_layer_start_index", 1, low=0),
        fields.integer("moe_layer_interval", 1),
    )
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = common.count - 1 if last < 0 else last
    sparse = [first <= index <= last and (index + 1) % step == 0 for index in range(common.count)]
    layer = LayerSpec(common.attention, common.feed_forward, Norms(common.norm))
    layers = mixed((layer,) * common.count, sparse, experts, common.feed_forward)
    return replace(common.model, layers=layers)


FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _read,
    RopeRules(theta=5e5, interleaved=True),
    config=ConfigRules(
        tied=True,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 4},
        spellings={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    ),
    tensors=TensorRules(
        {"mlp.router.correction": ("mlp.moe_statics.e_score_correction_bias",)}, unused=r"model\.mtp_.*"
    ),
    remote_code=True,
)
