"""The model family of DeepSeek-V3, DeepSeek-R1 and Kimi K2: latent attention, and experts that are chosen in
groups by sigmoid scores plus a correction.
"""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import grouped_router, layers_after, mixed, read_experts
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import Fields
from mlcbuild.models.latent_fields import SPELLINGS, read_latent
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = read_latent(fields, common, (512, 1536, 128, 128))
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    fields.neutral(
        {
            "rope_interleave": (True, None),
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "ep_size": (1, None),
        },
        "family 'deepseek_v3'",
    )
    # Num_nextn_predict_layers: layers that predict further tokens are not read
    fields.ignore(("num_mtp_layers", "num_nextn_predict_layers"))
    router = replace(
        grouped_router(fields, True),
        groups=fields.integer("n_group", 8, high=4096),
        groups_kept=fields.integer("topk_group", 4, high=4096),
        scale=fields.number("routed_scaling_factor", 2.5),
    )
    experts = read_experts(fields, common, router, defaults=(256, 8, 2048))
    experts = replace(experts, shared_size=experts.size * fields.integer("n_shared_experts", 1, high=64))
    sparse = layers_after(fields, common.count, 3)
    layers = mixed((layer,) * common.count, sparse, experts, common.feed_forward)
    return replace(common.model, layers=layers)


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read,
    RopeRules(interleaved=True),
    config=ConfigRules(
        head_dim=64, kv_heads_optional=True, defaults={"rms_norm_eps": 1e-6}, spellings=SPELLINGS
    ),
    tensors=TensorRules(unused=r"model\.layers\.{layers}\..*"),
    remote_code=True,
)
