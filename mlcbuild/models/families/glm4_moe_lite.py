"""The model family GLM-4.7-Flash: latent attention, and the experts of GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from mlcbuild.models.config import ModelConfig
from mlcbuild.models.expert_fields import grouped_router, layers_after, mixed, read_experts
from mlcbuild.models.family import Common, ConfigRules, Family, TensorRules
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.latent_fields import SPELLINGS, read_latent
from mlcbuild.models.layers import LayerSpec, Norms
from mlcbuild.models.rope import RopeRules


def _read(fields: Fields, common: Common) -> ModelConfig:
    attention = read_latent(fields, common, (512, 768, 192, 256))
    layer = LayerSpec(attention, common.feed_forward, Norms(common.norm))
    fields.neutral({"rope_interleave": (True, None), "topk_method": ("noaux_tc",)}, "family 'glm4_moe_lite'")
    # The ignored fields describe layers that predict further tokens.
    fields.ignore(("num_mtp_layers", "num_nextn_predict_layers"))
    experts = read_experts(fields, common, grouped_router(fields, True), defaults=(64, 4, 1536))
    scale = fields.number("routed_scaling_factor", 1.8)
    shared = experts.size * fields.integer("n_shared_experts", 1, high=64)
    experts = replace(experts, router=replace(experts.router, scale=scale), shared_size=shared)
    layers = mixed((layer,) * common.count, _sparse(fields, common.count), experts, common.feed_forward)
    return replace(common.model, layers=layers)


def _sparse(fields: Fields, count: int) -> tuple[bool, ...]:
    """Returns for each of `count` layers True if it has experts and False if its feed-forward is dense,
    according to mlp_layer_types in config.json or, if that is absent, first_k_dense_replace. A wrong
    mlp_layer_types adds an error message to `fields`, the reader of config.json, and counts as absent."""
    default, kinds = layers_after(fields, count, 1), fields.get("mlp_layer_types")
    if kinds in (None, ABSENT):
        return default
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {"dense", "sparse"}:
        fields.problem(
            "mlp_layer_types", f"must list dense or sparse for {count} layers, found {show(kinds)}"
        )
        return default
    return tuple(kind == "sparse" for kind in kinds)


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    _read,
    RopeRules(interleaved=True),
    config=ConfigRules(
        head_dim=64, kv_heads_optional=True, defaults={"rms_norm_eps": 1e-5}, spellings=SPELLINGS
    ),
    tensors=TensorRules(unused=r"model\.layers\.{layers}\..*"),
)
