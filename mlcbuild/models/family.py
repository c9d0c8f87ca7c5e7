"""Defines model families: each has a function from config.json to layers, and a table of tensor names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlcbuild.errors import CheckpointError
from mlcbuild.models.config import ModelConfig, parameters
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.layers import Attention, Dense, LayerSpec, Norm, Norms, RmsNorm
from mlcbuild.models.param import Activation, Param
from mlcbuild.models.rope import LAYER_KINDS, RopeRules
from mlcbuild.models.rounding import ROUNDING, f32
from mlcbuild.models.tensor_names import WHOLE, Piece, Range

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Name of an activation function in transformers -> name in this project. transformers' `gelu` is the exact
one, by erf."""

Names = Mapping[str, tuple[str, ...]]
"""Name of a parameter -> names of the checkpoint's tensors: one for the whole parameter, or one for each of
the matrices that it joins, such as gate and up. For a parameter of a layer, both are names within the layer,
without a prefix such as `model.layers.<i>.`."""

NORMS: Names = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "attn_norm.bias": ("input_layernorm.bias",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp_norm.bias": ("post_attention_layernorm.bias",),
}
POST_NORMS: Names = {
    "attn_post_norm.weight": ("post_attention_layernorm.weight",),
    "mlp_norm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp_post_norm.weight": ("post_feedforward_layernorm.weight",),
}
"""Name of a parameter within a layer -> names of the checkpoint's tensors, for layers with norms after
attention and after the feed-forward (OLMo 2), or before and after them (Gemma 2)."""
KINDS = ("weight", "bias")
MEGATRON: Names = {
    **{f"attn.qkv.{kind}": (f"self_attention.query_key_value.{kind}",) for kind in KINDS},
    **{f"attn.o.{kind}": (f"self_attention.dense.{kind}",) for kind in KINDS},
    **{f"mlp.up.{kind}": (f"mlp.dense_h_to_4h.{kind}",) for kind in KINDS},
    **{f"mlp.down.{kind}": (f"mlp.dense_4h_to_h.{kind}",) for kind in KINDS},
}
"""Name of a parameter within a layer -> names of the checkpoint's tensors, for layers whose query, key and
value are one tensor and whose feed-forward has no gate. Megatron introduced them."""
ATTENTION: Names = {
    "attn.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "attn.o.weight": ("self_attn.o_proj.weight",),
    "attn.o.bias": ("self_attn.o_proj.bias",),
    "attn.sinks": ("self_attn.sinks",),
}
LATENT: Names = {
    "attn.q.weight": ("self_attn.q_proj.weight",),
    "attn.q_a.weight": ("self_attn.q_a_proj.weight",),
    "attn.q_a.bias": ("self_attn.q_a_proj.bias",),
    "attn.q_a_norm.weight": ("self_attn.q_a_layernorm.weight",),
    "attn.q_b.weight": ("self_attn.q_b_proj.weight",),
    "attn.kv_a.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attn.kv_a.bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "attn.kv_a_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attn.k_b.weight": ("self_attn.kv_b_proj.weight",),
    "attn.v_b.weight": ("self_attn.kv_b_proj.weight",),
}
"""Name of a parameter of latent attention -> names of the checkpoint's tensors. The rows of kv_b_proj belong
alternately to the parameters k_b and v_b, head after head."""
DENSE: Names = {
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "mlp.down.bias": ("mlp.down_proj.bias",),
    "mlp.up.weight": ("mlp.up_proj.weight",),
    "mlp.up.bias": ("mlp.up_proj.bias",),
    "mlp.xielu": tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
}
EXPERTS: Names = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.correction": ("mlp.gate.e_score_correction_bias",),
    "mlp.experts.gate_up.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down.weight": ("mlp.experts.{}.down_proj.weight",),
    "mlp.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
"""Name of a parameter of experts -> names of the checkpoint's tensors. {} stands for the number of an expert;
a name without {} is that of one tensor with the matrices of all experts."""
LAYER: Names = {**NORMS, **ATTENTION, **LATENT, **DENSE, **EXPERTS}
"""Name of a parameter within a layer -> names of the tensors in checkpoints of Llama or, for latent attention
and experts, of DeepSeek, for every kind of attention and feed-forward. A family lists only the names that
differ."""


@dataclass(frozen=True)
class Common:
    """The values of the config.json fields that all model families share, as descriptions of attention,
    feed-forward, norm and model from which a family builds its layers."""

    attention: Attention
    """The description of attention over all positions, without biases and norms of queries and keys, and with
    the model's first rotary embedding if it has one."""
    feed_forward: Dense
    norm: Norm
    count: int
    """Number of layers of the model."""
    model: ModelConfig
    """The config of the model without its layers, which the model family adds. The norm between its last
    layer and its output matrix is the one that `norm` describes."""

    def layer(self, **attention: Any) -> LayerSpec:
        """Returns a layer with a norm before attention and before the feed-forward. attention: name of a
        field of Attention -> the value that replaces the family's common one."""
        return LayerSpec(replace(self.attention, **attention), self.feed_forward, Norms(self.norm))

    def of(self, layers: Iterable[LayerSpec], **changes: Any) -> ModelConfig:
        """Returns a copy of the model's config with `layers` as its layers. changes: name of another field of
        ModelConfig -> the value that replaces it."""
        return replace(self.model, layers=tuple(layers), **changes)

    def all_alike(self, fields: Fields, layer: LayerSpec, window: int | None = None) -> tuple[LayerSpec, ...]:
        """Returns one copy of `layer` for each layer of the model, all with the attention window `window` (in
        tokens; None: no window). Adds a problem to `fields`, the reader of config.json, if layer_types there
        contradicts this window."""
        return windowed(layer, same_window(fields, self.count, window))

    def by_kind(self, layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
        """Returns one copy of `layer` for each entry of `windows`, in order, with this attention window (in
        tokens; None: no window). Copies with a window use the model's last rotary embedding."""
        local = len(self.model.ropes) - 1
        return tuple(
            spec if spec.mixer.window is None else replace(spec, mixer=replace(spec.mixer, rope=local))
            for spec in windowed(layer, windows)
        )


@dataclass(frozen=True)
class ConfigRules:
    """The differences between config.json in one model family and in Llama, such as fields that may be
    absent, defaults, and names of fields. Llama itself states its rules with this class, too."""

    head_dim: int | None = None
    """Dimensions of an attention head if config.json has no field for them; None: hidden_size /
    num_attention_heads, as with a head_dim of null."""
    kv_heads_optional: bool = False
    """True if config.json may omit num_key_value_heads, which then equals num_attention_heads."""
    tied: bool = False
    """The value of tie_word_embeddings if config.json does not state it."""
    activation_field: str = "hidden_act"
    activation: str = "silu"
    """transformers' name of the activation function, a key of `activations`, if config.json states none."""
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    norm: Norm = field(default_factory=lambda: RmsNorm(1.0))
    """The kind of the model's norms, such as an RmsNorm. Its eps is replaced by the field rms_norm_eps of
    config.json, or by the one that `spellings` maps to this name."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Field name, as other families spell it -> value that transformers uses if config.json lacks the
    field."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """This family's own name of a field of config.json -> name that the other families use for it."""
    wide: bool = False
    """True if intermediate_size may be absent and then equals 4 * hidden_size."""


@dataclass(frozen=True)
class TensorRules:
    """The differences of the tensors in one model family's checkpoints from Llama's, such as names and order
    of rows."""

    names: Names | Callable[[ModelConfig], Names] = field(default_factory=dict)
    """Parameter name -> names of a checkpoint's tensors, for the parameters whose tensors have other names in
    this family than in Llama's checkpoints; or a function that returns this mapping for a model's config."""
    layers: str = "model.layers."
    """Prefix of the names of layers' tensors in a checkpoint, up to the number of the layer, with the dot."""
    fused_heads: bool = False
    """True if one tensor holds, for each key-value head, its query heads, its key and its value."""
    transposed: tuple[str, ...] = ()
    """Parameters, by their names within a layer, whose matrices a checkpoint stores as [in, out]."""
    alternating: bool = False
    """True if rows of gate and up alternate in the checkpoint's tensors of experts: gate, up, gate ..."""
    unused: str = ""
    """Regular expression for the whole names of checkpoint tensors that no model of the family reads.
    {layers} stands for the number of layers, which is also the index of an additional layer for drafts that
    some checkpoints have. Empty: there are no such tensors."""

    def own_names(self, config: ModelConfig) -> Names:
        """Returns parameter name -> names of a checkpoint's tensors, where these differ from Llama's, for a
        model with this config."""
        return self.names(config) if callable(self.names) else self.names


@dataclass(frozen=True)
class Family:
    """One model family, which config.json names by its model_type, with the rules for reading its configs and
    checkpoints."""

    name: str
    architecture: str
    """The class that `architectures` in config.json must name, where it names any."""
    read: Callable[[Fields, Common], ModelConfig]
    """Function of (reader of config.json, what all families share) that reads the fields which only this
    family has, and returns the model with its layers. It adds problems to the reader."""
    rope: RopeRules | None = field(default_factory=RopeRules)
    """Rules for reading the rotary embedding from config.json; None: no layer is rotated."""
    config: ConfigRules = field(default_factory=ConfigRules)
    tensors: TensorRules = field(default_factory=TensorRules)
    remote_code: bool = False
    """True if checkpoints of the family may refer to code of their own (auto_map), because that code computes
    what transformers' implementation computes."""
    texts: tuple[Family, ...] = ()
    """The model families that may describe the text model of a config.json that holds it under `text_config`,
    beside other models such as a vision tower. If `text_config` has no model_type, the first of them applies.
    Empty for families whose config.json is that of a text model."""


def sources_of(family: Family, config: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Returns parameter name -> descriptions (Piece) of the checkpoint's tensors, or of ranges of their rows,
    that make up the parameter when they are joined along axis 0. Raises CheckpointError if the
    family names a wrong number of tensors for a parameter."""
    names = {**LAYER, **WHOLE, **family.tensors.own_names(config)}
    sources = {}
    for param in parameters(config):
        _, _, rest = param.name.partition("layers.")
        index, _, name_in_layer = rest.partition(".")
        tensors = names[name_in_layer or param.name]
        if name_in_layer:
            tensors = tuple(f"{family.tensors.layers}{index}.{name}" for name in tensors)
        pieces = _pieces(family, param, tensors)
        mixer = config.layers[int(index)].mixer if name_in_layer else None
        if isinstance(mixer, LatentAttention):
            pieces = latent_pieces(
                mixer, name_in_layer, pieces, family.rope is not None and family.rope.interleaved
            )
        elif mixer is not None:
            pieces = _reordered(family, config, mixer, param, pieces)
        sources[param.name] = pieces
    return sources


def _pieces(family: Family, param: Param, tensors: tuple[str, ...]) -> tuple[Piece, ...]:
    """Returns descriptions (Piece) of the checkpoint's tensors that hold a parameter: one, one for each
    matrix or vector that it joins (such as gate and up), one for each expert, or one for each matrix of each
    expert. tensors: their names, with {} for numbers. Raises CheckpointError if there are too few or many."""
    rest = param.shape[1:]
    numbered = any("{}" in name for name in tensors)
    if len(tensors) == 1 and numbered and not rest:
        return tuple(Piece(tensors[0].format(part), rows) for part, rows in enumerate(param.parts))
    if len(tensors) == 1 and not numbered:
        return (_whole(family, param, tensors[0]),)
    rows = param.parts if len(tensors) > 1 else (rest[0],)
    if len(rows) != len(tensors):
        raise CheckpointError(
            f"family '{family.name}' names {len(tensors)} tensors for {param.name}, which has"
            f" {len(param.parts)} parts: name one for each, or one for all"
        )
    experts = range(param.count) if numbered else range(1)
    pairs = [*zip(tensors, rows, strict=True)]
    return tuple(Piece(name.format(expert), count) for expert in experts for name, count in pairs)


def _whole(family: Family, param: Param, tensor: str) -> Piece:
    """Returns the description (Piece) of the checkpoint's tensor `tensor`, which the caller knows to hold the
    whole parameter `param`: its name, its number of rows and, where the tensor differs from the parameter,
    that it is stored transposed, and the order of its columns."""
    kind, count = param.name.split(".", 2)[-1], param.shape[0]
    columns: tuple[Range, ...] = ()
    if family.tensors.alternating and kind.startswith("mlp.experts.gate_up."):
        rows = param.shape[1]
        columns = ((0, rows, 2), (1, rows, 2))
    if kind not in family.tensors.transposed:
        return Piece(tensor, count, columns=columns)
    *_, out, inner = param.shape
    return Piece(tensor, param.count * out, inner, ((0, inner, 1),), columns, transposed=True)


def _reordered(
    family: Family, config: ModelConfig, mixer: Attention, param: Param, pieces: tuple[Piece, ...]
) -> tuple[Piece, ...]:
    """Returns the descriptions `pieces` of the checkpoint's tensors that hold an attention parameter, with
    the rows to read from each tensor and their order added. This concerns tensors that mix rows of query, key
    and value, and heads whose rotary embedding pairs neighbouring rows; other descriptions are returned
    unchanged. mixer: the layer's attention."""
    kind, dim = param.name.split(".", 2)[-1], mixer.head_dim
    is_qkv = kind.startswith("attn.qkv.")
    if is_qkv and family.tensors.fused_heads:
        group = mixer.heads // mixer.kv_heads * dim
        spans = ((0, group, 1), (group, group + dim, 1), (group + dim, group + 2 * dim, 1))
        spans_by_part = zip(param.parts, spans, strict=True)
        return tuple(Piece(pieces[0].tensor, rows, group + 2 * dim, (span,)) for rows, span in spans_by_part)
    turned = pieces[:2] if is_qkv else pieces
    is_turned = is_qkv or kind.startswith(("attn.q_norm.", "attn.k_norm."))
    if family.rope is None or not family.rope.interleaved or not is_turned:
        return pieces
    # Rows of all layers are reordered in the same way: only the common order of keys and queries matters.
    rotated = config.ropes[0].dim
    take = ((0, rotated, 2), (1, rotated, 2), (rotated, dim, 1))
    return (*(replace(piece, block=dim, take=take) for piece in turned), *pieces[len(turned) :])


def latent_pieces(
    mixer: LatentAttention, kind: str, pieces: tuple[Piece, ...], interleaved: bool
) -> tuple[Piece, ...]:
    """Returns the descriptions `pieces` of the checkpoint's tensors that hold a parameter of latent
    attention, with the ranges of rows that belong to it added, in the parameter's order. kind: name of the
    parameter in its layer. interleaved: True if rotated dimensions are stored as pairs of neighbours."""
    both = mixer.head_dim + mixer.value_dim
    if kind == "attn.k_b.weight":
        rows, take = mixer.heads * mixer.latent, ((0, mixer.head_dim, 1),)
        return (Piece(pieces[0].tensor, rows, both, take, transposed=True),)
    if kind == "attn.v_b.weight":
        return (Piece(pieces[0].tensor, mixer.heads * mixer.value_dim, both, ((mixer.head_dim, both, 1),)),)
    starts = {"attn.q": mixer.head_dim, "attn.q_b": mixer.head_dim, "attn.kv_a": mixer.latent}
    start = starts.get(kind.rpartition(".")[0])
    if start is None or not interleaved:
        return pieces
    end = start + mixer.rope_dim
    return (replace(pieces[0], block=end, take=((0, start, 1), (start, end, 2), (start + 1, end, 2))),)


def windowed(layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
    """Returns one copy of `layer` for each entry of `windows`, in order. The copies differ only in the
    attention window, which is the entry (in tokens; None: no window)."""
    windows = tuple(windows)
    layers = {window: replace(layer, mixer=replace(layer.mixer, window=window)) for window in set(windows)}
    return tuple(layers[window] for window in windows)


def same_window(fields: Fields, count: int, window: int | None) -> tuple[int | None, ...]:
    """Returns `window` (in tokens; None: no window) `count` times, once for each layer. Adds a problem to
    `fields`, the reader of config.json, if `layer_types` there contradicts this."""
    kind = LAYER_KINDS[0] if window is None else LAYER_KINDS[1]
    layer_windows(fields, [kind] * count, window)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and fields.sound("layer_types") and set(kinds) != {kind}:
        fields.problem("layer_types", f"every layer must be {kind}, as sliding_window {show(window)} says")
    return (window,) * count


def layer_windows(fields: Fields, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Returns the attention window of each layer, in tokens; None for a layer without one. fields: the reader
    of config.json, in which layer_types lists the kinds of layers. A wrong list adds an error message to
    `fields`, and so does a `window` of None (off) if a layer has the kind "sliding_attention"; no layer has a
    window then. kinds: the kind of each layer, "full_attention" or "sliding_attention", which applies if
    layer_types is absent. window: tokens of the window."""
    listed, count = fields.get("layer_types"), len(kinds)
    if listed is not None and listed is not ABSENT:
        if not isinstance(listed, list) or any(kind not in LAYER_KINDS for kind in listed):
            fields.problem("layer_types", f"must list {' or '.join(LAYER_KINDS)}, found {show(listed)}")
            return (None,) * count
        if len(listed) != count:
            if fields.sound("num_hidden_layers"):
                fields.problem("layer_types", f"lists {len(listed)} of {count} layers")
            return (None,) * count
        kinds = listed
    if window is None and LAYER_KINDS[1] in kinds and fields.sound("sliding_window"):
        fields.problem(
            "sliding_window",
            "must be the number of tokens of the window, because some layers are sliding_attention; it is"
            " off: write the number, or full_attention for every layer in layer_types",
        )
    return tuple(window if kind == LAYER_KINDS[1] else None for kind in kinds)


def every(step: int, count: int) -> list[str]:
    """Returns a list of `count` kinds of layers: "full_attention" (no window) for every `step`-th, the first
    of them at index step - 1, "sliding_attention" for the others."""
    full, sliding = LAYER_KINDS
    return [sliding if (index + 1) % step else full for index in range(count)]


def unrotated(layers: Sequence[LayerSpec], rotated: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Returns a copy of `layers`, the specifications of a model's layers, in which those whose entry in
    `rotated` is False have attention without rotary embedding."""
    return tuple(
        layer if is_rotated else replace(layer, mixer=replace(layer.mixer, rope=None))
        for layer, is_rotated in zip(layers, rotated, strict=True)
    )


def scaled_embedding(fields: Fields, hidden: int) -> float:
    """Returns sqrt(hidden), by which Gemma's embeddings are multiplied, rounded to the checkpoint's dtype:
    `dtype` (transformers 5) or `torch_dtype` (before) in config.json, float32 if it has neither. A dtype but
    float32, float16 and bfloat16 adds an error message to `fields` and counts as float32."""
    dtype = "torch_dtype" if fields.get("dtype") in (None, ABSENT) else "dtype"
    scale: float = fields.choice(dtype, ROUNDING, "float32")(f32(math.sqrt(hidden)))
    return scale
