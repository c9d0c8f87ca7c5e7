"""The model family DeepSeek-V2: latent attention, and experts that are chosen by a softmax, within groups if
topk_method in the config is group_limited_greedy."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import layers_after, mixed, read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.latent_fields import SPELLINGS, read_latent
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = read_latent(fields, common, (512, 1536, 128, 128))
    bias = fields.flag("mlp_bias", False)
    if bias:
        fields.problem("mlp_bias", "must be false: biases of shared experts are not supported")
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    grouped = fields.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    # transformers never divides V2's weights by their sum, whatever norm_topk_prob is.
    fields.neutral({"norm_topk_prob": (False, None), "scoring_func": ("softmax",)}, "family 'deepseek_v2'")
    fields.neutral({"moe_layer_freq": (1,), "ep_size": (1, None)}, "family 'deepseek_v2'")
    router = Router(
        normalized=False,
        groups=fields.integer("n_group", 1, high=4096) if grouped else 1,
        groups_kept=fields.integer("topk_group", 1, high=4096) if grouped else 1,
        scale=fields.number("routed_scaling_factor", 1.0),
        group_by_largest=grouped,
    )
    fields.ignore(("n_group", "topk_group"))
    experts = read_experts(fields, common, router, defaults=(64, None, 1407))
    experts = replace(experts, shared_size=experts.size * fields.integer("n_shared_experts", 2, high=64))
    sparse = layers_after(fields, common.count, 0)
    layers = mixed((layer,) * common.count, sparse, experts, common.feed_forward)
    return replace(common.model, layers=layers)


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _read,
    RopeRules(interleaved=True),
    config=ConfigRules(
        head_dim=64, kv_heads_optional=True, defaults={"rms_norm_eps": 1e-6}, spellings=SPELLINGS
    ),
    remote_code=True,
)
