"""The model family OLMoE: Llama with experts in every layer; one norm spans all query heads, another all key
heads.
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.family import Common, ConfigRules, Family
from mlcbuild.models.fields import Fields
from mlcbuild.models.layers import LayerSpec, Norms


def _read(fields: Fields, common: Common) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    attention = replace(
        common.attention,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=common.norm,
        qk_norm_span="heads",
        clip=fields.maybe_number("clip_qkv", None),
    )
    router = Router(normalized=fields.flag("norm_topk_prob", False))
    experts = read_experts(fields, common, router, size="intermediate_size", defaults=(64, 8, None))
    layer = LayerSpec(attention, experts, Norms(common.norm))
    return replace(common.model, layers=(layer,) * common.count)


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _read,
    config=ConfigRules(kv_heads_optional=True),
)
