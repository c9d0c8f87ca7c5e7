"""The model family MiniMax-M2: one norm spans all query heads, another all key heads; experts are chosen by
sigmoid scores plus a correction."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import read_experts
from mlcbuild.models.experts import Router
from mlcbuild.models.families import mixtral
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = replace(common.attention, qk_norm=common.norm, qk_norm_span="heads")
    kinds = fields.get("attn_type_list")
    if kinds not in (None, ABSENT) and kinds != [1] * common.count:
        fields.problem("attn_type_list", f"must be 1 for each layer, full attention; found {show(kinds)}")
    fields.neutral(
        {
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            **{f"layernorm_{part}_beta": (1.0, 1) for part in ("full_attention", "linear_attention", "mlp")},
        },
        "family 'minimax_m2'",
    )
    # The fields configure training, layers that predict further tokens, and shared experts, which these
    # models do not have.
    fields.ignore(("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"))
    fields.ignore(("shared_moe_mode",))
    router = Router("sigmoid", correction=True)
    experts = read_experts(fields, common, router, size="intermediate_size", defaults=(256, 8, None))
    layer = LayerSpec(attention, experts, Norms(common.norm))
    return replace(common.model, layers=(layer,) * common.count)


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _read,
    RopeRules(partial=1.0, rotary_dim=True, theta=5e6),
    config=ConfigRules(head_dim=128, defaults={"rms_norm_eps": 1e-6}),
    tensors=TensorRules(
        {**mixtral.NAMES, "mlp.router.correction": ("block_sparse_moe.e_score_correction_bias",)},
        unused=r"model\.layers\.{layers}\..*",
    ),
    remote_code=True,
)
