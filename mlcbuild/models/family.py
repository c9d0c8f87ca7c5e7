"""Families of models: a function from config.json to layers, and a table of tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlcbuild.errors import CheckpointError
from mlcbuild.models.config import ModelConfig
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.layers import Attention, Dense, LayerSpec, RmsNorm
from mlcbuild.models.param import Activation, Param
from mlcbuild.models.rope import LAYER_KINDS, RopeRules
from mlcbuild.models.tensor_names import WHOLE, Piece

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""transformers' names. Its `gelu` is the exact one, by erf, and not the same function."""

Names = Mapping[str, tuple[str, ...]]
"""Parameter within a layer -> the checkpoint's tensors below `model.layers.<i>.`: one for each part of the
parameter, or one for all of it."""

NORMS: Names = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
}
ATTENTION: Names = {
    "attn.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "attn.o.weight": ("self_attn.o_proj.weight",),
    "attn.o.bias": ("self_attn.o_proj.bias",),
}
DENSE: Names = {
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "mlp.down.bias": ("mlp.down_proj.bias",),
}
EXPERTS: Names = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.correction": ("mlp.gate.e_score_correction_bias",),
    "mlp.experts.gate_up.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down.weight": ("mlp.experts.{}.down_proj.weight",),
    "mlp.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
"""{} stands for the number of an expert; a name without it is that of a stack."""
LAYER: Names = {**NORMS, **ATTENTION, **DENSE, **EXPERTS}
"""The names of all blocks, as Llama began them; a family lists only where its own differ."""


@dataclass(frozen=True)
class Common:
    """The meaning of the fields that all families share: blocks from which a family makes its layers."""

    attention: Attention
    """Over all positions, without biases and norms of its own, with rope 0."""
    feed_forward: Dense
    norm: RmsNorm
    count: int
    """Number of layers."""
    model: ModelConfig
    """The model without layers; its last norm is `norm`."""


@dataclass(frozen=True)
class Family:
    """One model_type."""

    name: str
    architecture: str
    """The class that config.json's `architectures` must name, where it names any."""
    read: Callable[[Fields, Common], ModelConfig]
    """Reads the fields that only this family has, and returns the model with its layers."""
    rope: RopeRules = field(default_factory=RopeRules)
    names: Names = field(default_factory=dict)
    """Names of tensors that differ from those in LAYER."""
    head_dim: int | None = None
    """Where config.json has none; None: hidden_size / num_attention_heads."""
    kv_heads_optional: bool = False
    """An absent num_key_value_heads means num_attention_heads."""
    tied: bool = False
    """tie_word_embeddings where config.json has none."""
    activation_field: str = "hidden_act"
    activation: str = "silu"
    remote_code: bool = False
    """Checkpoints may carry their own code (auto_map): it computes what the family does."""


def sources_of(family: Family, params: Iterable[Param]) -> dict[str, tuple[Piece, ...]]:
    """Returns parameter -> the tensors of a checkpoint that make it up, to be stacked along axis 0."""
    layer = {**LAYER, **family.names}
    sources = {}
    for param in params:
        tensors = WHOLE.get(param.name)
        if tensors is None:
            _, index, own = param.name.split(".", 2)
            tensors = tuple(f"model.layers.{index}.{name}" for name in layer[own])
        sources[param.name] = _pieces(family, param, tensors)
    return sources


def _pieces(family: Family, param: Param, tensors: tuple[str, ...]) -> tuple[Piece, ...]:
    """Returns the tensors of a parameter: one, one for each part, or one for each expert or its parts."""
    whole, *rest = param.shape
    numbered = any("{}" in name for name in tensors)
    if len(tensors) == 1 and not numbered:
        return (Piece(tensors[0], whole),)
    rows = param.parts if len(tensors) > 1 else (rest[0],)
    if len(rows) != len(tensors):
        raise CheckpointError(
            f"family '{family.name}' names {len(tensors)} tensors for {param.name}, which has"
            f" {len(param.parts)} parts: name one for each, or one for all"
        )
    experts = range(param.count) if numbered else range(1)
    pairs = [*zip(tensors, rows, strict=True)]
    return tuple(Piece(name.format(expert), count) for expert in experts for name, count in pairs)


def windowed(layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
    """Returns one layer for each window: `layer` with this window in its attention."""
    windows = tuple(windows)
    layers = {window: replace(layer, mixer=replace(layer.mixer, window=window)) for window in set(windows)}
    return tuple(layers[window] for window in windows)


def same_window(fields: Fields, count: int, window: int | None) -> tuple[int | None, ...]:
    """Returns the windows of a family whose layers are all alike; `layer_types` may not contradict that."""
    kind = LAYER_KINDS[0] if window is None else LAYER_KINDS[1]
    layer_windows(fields, [kind] * count, window)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and fields.sound("layer_types") and set(kinds) != {kind}:
        fields.problem("layer_types", f"every layer must be {kind}, as sliding_window {show(window)} says")
    return (window,) * count


def layer_windows(fields: Fields, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each layer. `kinds` (of LAYER_KINDS) holds where config.json has no
    `layer_types`."""
    listed, count = fields.get("layer_types"), len(kinds)
    if listed is not None and listed is not ABSENT:
        if not isinstance(listed, list) or any(kind not in LAYER_KINDS for kind in listed):
            fields.problem("layer_types", f"must list {' or '.join(LAYER_KINDS)}, found {show(listed)}")
            return (None,) * count
        if len(listed) != count and fields.sound("num_hidden_layers"):
            fields.problem("layer_types", f"lists {len(listed)} of {count} layers")
            return (None,) * count
        kinds = listed
    if window is None and LAYER_KINDS[1] in kinds and fields.sound("sliding_window"):
        fields.problem("sliding_window", "is off, but some layers are sliding_attention; give the window")
    return tuple(window if kind == LAYER_KINDS[1] else None for kind in kinds)
