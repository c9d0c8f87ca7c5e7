"""Reads the config.json fields that describe multi-head latent attention, and that all model families with
such attention share."""

from __future__ import annotations

from mlcbuild.models.family import Common
from mlcbuild.models.fields import Fields, is_number, show
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.rotary import yarn_attention

SPELLINGS = {"qk_rope_head_dim": "head_dim"}
"""Name of a field in config.json -> name under which the code that reads rotary embeddings looks it up. In
latent attention that code gets only the rotated dimensions of each head, as if they were the whole head."""


def read_latent(
    fields: Fields, common: Common, defaults: tuple[int, int, int, int], eps: float = 1e-6
) -> LatentAttention:
    """Reads config.json and returns the description of the latent attention that every layer has. Each wrong
    value adds a problem to `fields`, and the description must then not be used.

    common: the result of reading the fields that all model families have. defaults: values of kv_lora_rank,
    q_lora_rank, qk_nope_head_dim and v_head_dim, in this order, where config.json lacks them. eps: the eps of
    the norms of latents.
    """
    heads, attention = common.attention.heads, common.attention
    if fields.sound("num_key_value_heads") and attention.kv_heads != heads:
        fields.problem(
            "num_key_value_heads", f"must be num_attention_heads {heads}, found {attention.kv_heads}"
        )
    latent, query, unrotated, value = defaults
    head_dim = fields.integer("qk_nope_head_dim", unrotated, high=2**12)
    rope_dim = attention.head_dim
    if fields.has("qk_head_dim") and fields.get("qk_head_dim") != head_dim + rope_dim:
        stated = show(fields.get("qk_head_dim"))
        fields.problem("qk_head_dim", f"must be {head_dim + rope_dim}, the sum of both parts, found {stated}")
    fields.ignore(("qk_head_dim",))
    has_bias = fields.flag("attention_bias", False)
    mscale = _mscale(fields)
    return LatentAttention(
        heads,
        fields.integer("kv_lora_rank", latent, high=2**16),
        head_dim,
        rope_dim,
        fields.integer("v_head_dim", value, high=2**12),
        (head_dim + rope_dim) ** -0.5 * mscale * mscale,
        eps,
        fields.maybe_integer("q_lora_rank", query) or 0,
        bias=has_bias,
        output_bias=has_bias,
    )


def _mscale(fields: Fields) -> float:
    """Returns the factor by which queries, and also keys, are multiplied because of mscale_all_dim in YaRN's
    rope object of config.json, so that attention scores are multiplied by its square. It is 1 if that field
    is absent or 0, if the rope object is of another type, or if it does not extend the context."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if isinstance(scaling, dict) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
            factor, weight = scaling.get("factor"), scaling.get("mscale_all_dim")
            if is_number(factor) and is_number(weight) and weight:
                return 1.0 if factor <= 1 else (yarn_attention(factor, None, None) - 1) * weight + 1
    return 1.0
