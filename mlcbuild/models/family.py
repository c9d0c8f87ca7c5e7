"""What a family of models is: rules for its config.json and a table of its tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlcbuild.models.config import Activation, ModelConfig
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.rope import LAYER_KINDS, RopeRules
from mlcbuild.models.tensor_names import WHOLE

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""transformers' names. Its `gelu` is the exact one, by erf, and not the same function."""

LAYER: Mapping[str, tuple[str, ...]] = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "attn.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "attn.o.weight": ("self_attn.o_proj.weight",),
    "attn.o.bias": ("self_attn.o_proj.bias",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "mlp.down.bias": ("mlp.down_proj.bias",),
}
"""Tensors of one layer, in the naming that Llama began: those of `model.layers.<i>.` to be stacked."""


@dataclass(frozen=True)
class Family:
    """One model_type. `extend` reads the fields that only this family has and completes the config."""

    name: str
    architecture: str
    """The class that config.json's `architectures` must name, where it names any."""
    extend: Callable[[Fields, ModelConfig], ModelConfig]
    layer: Mapping[str, tuple[str, ...]]
    rope: RopeRules
    head_dim: int | None = None
    """Where config.json has none; None: hidden_size / num_attention_heads."""
    kv_heads_optional: bool = False
    """Whether an absent num_key_value_heads means num_attention_heads."""
    tied: bool = False
    """tie_word_embeddings where config.json has none."""
    activation_field: str = "hidden_act"
    activation: str = "silu"
    remote_code: bool = False
    """Whether checkpoints that carry their own code (auto_map) compute what the family does."""


def sources_of(family: Family, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a checkpoint that make up each of our parameters, to be stacked along axis 0."""
    found = {}
    for name in names:
        if name in WHOLE:
            found[name] = WHOLE[name]
            continue
        _, index, part = name.split(".", 2)
        found[name] = tuple(f"model.layers.{index}.{own}" for own in family.layer[part])
    return found


def same_window(config: ModelConfig, fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """Windows of a family whose layers are all alike. `layer_types` may say so too, but nothing else."""
    kind = LAYER_KINDS[0] if window is None else LAYER_KINDS[1]
    layer_windows(config, fields, [kind] * config.num_layers, window)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and fields.sound("layer_types") and set(kinds) != {kind}:
        fields.problem("layer_types", f"every layer must be {kind}, as sliding_window {show(window)} says")
    return (window,) * config.num_layers


def layer_windows(
    config: ModelConfig, fields: Fields, kinds: Sequence[str], window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer. `kinds` holds where config.json has no `layer_types`."""
    listed = fields.get("layer_types")
    if listed is not None and listed is not ABSENT:
        if not isinstance(listed, list) or any(kind not in LAYER_KINDS for kind in listed):
            fields.problem("layer_types", f"must list {' or '.join(LAYER_KINDS)}, found {show(listed)}")
            return (None,) * config.num_layers
        if len(listed) != config.num_layers and fields.sound("num_hidden_layers"):
            fields.problem("layer_types", f"lists {len(listed)} of {config.num_layers} layers")
            return (None,) * config.num_layers
        kinds = listed
    if window is None and LAYER_KINDS[1] in kinds and fields.sound("sliding_window"):
        fields.problem("sliding_window", "is off, but some layers are sliding_attention; give the window")
    return tuple(window if kind == LAYER_KINDS[1] else None for kind in kinds)
