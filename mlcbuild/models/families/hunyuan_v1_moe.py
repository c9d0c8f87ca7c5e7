"""The model family Hunyuan with experts: the dense model's attention, and an expert that all tokens use."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.experts import Experts
from mlcbuild.models.families import hunyuan_v1_dense
from mlcbuild.models.family import Common, TensorRules
from mlcbuild.models.fields import Fields

_OFF = ("group_limited_greedy", "position_embedding_xdrope", "use_mla")
_ON = ("norm_topk_prob", "use_mixed_mlp_moe")
_NULL = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SPELLINGS = {"attention_head_dim": "head_dim", "num_experts_per_tok": "moe_topk"}
_ALONE = {
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_ON, (True,)),
    **dict.fromkeys((*_NULL, "xdrope_section"), (None,)),
    **dict.fromkeys(("n_group", "topk_group"), (None, False)),
    "moe_layer_num_skipped": (0,),
    "routed_scaling_factor": (1.0, False),
}
"""Field of Hunyuan's config.json that transformers ignores -> values that agree with what it computes; any
other value adds an error message."""


def _read(fields: Fields, common: Common) -> ModelConfig:
    dense, size = hunyuan_v1_dense.read(fields, common), common.feed_forward.size
    count = fields.integer("num_experts", 1, high=4096)
    fields.neutral({"num_local_experts": (None, count)}, "family 'hunyuan_v1_moe'")
    for name, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if set(fields.integers(name, common.count, value)) != {value}:
            fields.problem(name, f"must be {value} for every layer")
    chosen = fields.integers("moe_topk", common.count, 1)
    fields.neutral(_ALONE, "family 'hunyuan_v1_moe'")
    fields.ignore(("moe_drop_tokens", "moe_random_routing_dropped_token", "output_router_logits"))
    experts = Experts(count, 1, size, common.feed_forward.activation, shared_size=size)
    pairs = zip(dense.layers, chosen, strict=True)
    layers = tuple(replace(layer, feed_forward=replace(experts, chosen=count)) for layer, count in pairs)
    return replace(dense, layers=layers)


FAMILY = replace(
    hunyuan_v1_dense.FAMILY,
    config=replace(hunyuan_v1_dense.FAMILY.config, spellings=_SPELLINGS),
    tensors=TensorRules(
        {
            **hunyuan_v1_dense.NAMES,
            "mlp.router.weight": ("mlp.gate.wg.weight",),
            "mlp.shared.gate_up.weight": ("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
            "mlp.shared.down.weight": ("mlp.shared_mlp.down_proj.weight",),
        }
    ),
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    read=_read,
    remote_code=True,
)
