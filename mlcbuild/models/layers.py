"""Describes the layers of a decoder as data, and lists the kinds of attention and feed-forward that exist.

A LayerSpec names a mixer (attention, which combines positions), a feed-forward (which works on one position),
and the norms and the residual form around them. A new kind of mixer or feed-forward is a dataclass and an
entry in `MIXERS` or `FEED_FORWARDS`, a table of tensor names in `family.py`, and a function in
`bundles/reference_blocks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from mlcbuild.models.experts import Experts, experts_faults, experts_numbers, experts_parameters
from mlcbuild.models.latent import LatentAttention, latent_faults, latent_numbers, latent_parameters
from mlcbuild.models.param import Activation, Param

Residual = Literal["sequential", "parallel", "parallel_shared"]
"""The form of a layer's residual connections, where x is the residual stream. sequential: x +=
mixer(norm(x)), then x += feed_forward(norm(x)). parallel: x += mixer(norm(x)) + feed_forward(norm(x)), each
with its own norm. parallel_shared: the same with one norm.
"""
HeadNorm = Literal["head", "own_head", "heads"]
"""The span of a norm of queries and keys. head: each head is normalized, all with the same weights; own_head:
each head is normalized, with separate weights; heads: all heads of a token are normalized together.
"""
Alibi = Literal["exact", "bfloat16"]
"""How the biases of ALiBi (Press et al., 2022) are computed. key and query are positions. exact: slope * (key
- query) is added to scaled scores. bfloat16: slope * key, with slope, key and product in bfloat16, is added
before the scaling."""


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with the position: the query at position p is multiplied by 1 + beta *
    ln(1 + floor(p / length)) (Llama 4)."""

    beta: float
    length: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, independent of how a checkpoint spells it.

    The pair (i, i + dim/2) at position p is rotated by the angle p * inv_freq[i]; cos and sin are multiplied
    by `attention_factor`. With LongRoPE, `inv_freq_long` and `long_factor` replace `inv_freq` and
    `attention_factor` if the context window of the compiled library exceeds `original_max_position` tokens;
    the function `frequencies` chooses. Without LongRoPE, `inv_freq_long`, `long_factor` and
    `original_max_position` are None.
    """

    dim: int
    """Number of rotated dimensions of each attention head, an even number: the first ones of head_dim or, in
    latent attention, all that follow the unrotated ones. The others pass unchanged."""
    inv_freq: tuple[float, ...]
    """The dim / 2 inverse frequencies of the rotation in radians per position, each exactly representable
    in float32.
    """
    attention_factor: float = 1.0
    inv_freq_long: tuple[float, ...] | None = None
    long_factor: float | None = None
    """Factor of cosines and sines that is used together with the inverse frequencies `inv_freq_long`.
    Checkpoints use the name long_factor for a list of other numbers."""
    original_max_position: int | None = None
    query_scale: QueryScale | None = None

    @property
    def columns(self) -> int:
        """Returns the number of float32 values of rotary embedding that a compiled program computes for each
        position: dim / 2 cosines, dim / 2 sines, and the scale of the query if there is one."""
        return self.dim + (self.query_scale is not None)


def frequencies(rope: Rope, context_window: int) -> tuple[tuple[float, ...], float]:
    """Returns (inverse frequencies, attention factor) of a rotary embedding in a compiled library. LongRoPE
    has two such pairs, for short and for long contexts. context_window: maximum number of tokens of a
    sequence in the library; if it exceeds the context of the model's original training, the pair for long
    contexts is returned."""
    if rope.inv_freq_long is None or rope.long_factor is None or rope.original_max_position is None:
        return rope.inv_freq, rope.attention_factor
    if context_window <= rope.original_max_position:
        return rope.inv_freq, rope.attention_factor
    return rope.inv_freq_long, rope.long_factor


@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm: x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    eps: float
    offset: float = 0.0
    """Number that is added to the norm's weights: 1 in Gemma, which stores them as differences from 1."""


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm: (x - mean(x)) / sqrt(variance(x) + eps) * (weight + offset) + bias."""

    eps: float
    offset: float = 0.0
    """Number that is added to the norm's weights: 1 in Nemotron, which stores them as differences from 1."""
    weight: bool = True
    bias: bool = True


Norm: TypeAlias = RmsNorm | LayerNorm


@dataclass(frozen=True)
class Norms:
    """The norms of a layer before and after its mixer (attention), and before and after its feed-forward,
    each with weights of its own. The residual form parallel_shared has one norm before both."""

    before: Norm | None
    """The kind of norm of the two inputs that the mixer and the feed-forward read from the residual stream;
    None: these inputs are not normalized."""
    after: Norm | None = None
    """The kind of norm of the two outputs that the mixer and the feed-forward add to the residual stream
    (Gemma 2); None: these outputs are not normalized."""


@dataclass(frozen=True)
class Attention:
    """The description of one layer's grouped-query attention over a KV cache."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the products of queries and keys, before the soft cap and the softmax."""
    rope: int | None = 0
    """Index of the layer's Rope in ModelConfig.ropes; None: queries and keys are not rotated."""
    window: int | None = None
    """Number of most recent positions that a query attends to, including its own; None: all. A window larger
    than the context has no effect.
    """
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    """The norm of queries and keys (QK-norm); None: they are not normalized."""
    softcap: float | None = None
    """The c in c * tanh(score / c), which limits attention scores; None: they are not limited."""
    qk_norm_span: HeadNorm = "head"
    qk_norm_last: bool = False
    """True if queries and keys are normalized after the rotation (Hunyuan), each head by itself; False if
    before it."""
    clip: float | None = None
    """Limit to which queries, keys and values are clipped, -clip .. clip, before the rotation (OLMo, OLMoE);
    None: they are not clipped. Queries and keys are normalized before they are clipped, unless
    `qk_norm_last`."""
    alibi: Alibi | None = None
    sinks: bool = False
    """True if each head has an attention sink: one more score, which is a parameter, takes part in the
    softmax but has no value.
    """


@dataclass(frozen=True)
class Dense:
    """A feed-forward: down(activation(gate(x)) * up(x)), or down(activation(up(x))) if it is not gated."""

    size: int
    """Number of inner values (hidden units) of the feed-forward: rows of gate and of up."""
    activation: Activation = "silu"
    bias: bool = False
    """True if the matrices gate, up and down have biases."""
    gated: bool = True


Mixer: TypeAlias = Attention | LatentAttention
FeedForward: TypeAlias = Dense | Experts


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model: its mixer (attention), its feed-forward, their norms and the form of the residual
    connections."""

    mixer: Mixer
    feed_forward: FeedForward
    norms: Norms
    residual: Residual = "sequential"
    residual_scale: float = 1.0
    """Factor of the outputs that a layer's mixer and feed-forward add to the residual stream (Granite)."""


@dataclass(frozen=True)
class Block:
    """The properties of one kind of mixer (such as attention) or feed-forward: its name in JSON, and
    functions which compute from a description of this kind its parameters, the shape of what it caches for
    each token, and error messages for contradictory fields."""

    kind: str
    """Value of the field `kind` that stands for one class of mixers or feed-forwards in JSON, such as
    "attention"."""
    parameters: Callable[[Any, int], Iterator[Param]]
    """Function of (description of a mixer or feed-forward, hidden size) that yields its parameters, named as
    within the layer, in stored order."""
    cached: Callable[[Any], tuple[int, ...]]
    """Function from the description of a mixer or feed-forward to the shape of what it caches for each token,
    such as (2, kv_heads, head_dim); () if it caches nothing.
    """
    faults: Callable[[Any, Sequence[Rope]], Iterator[str]]
    """Function of (description of a mixer or feed-forward, the model's rotary embeddings) that yields an
    error message for each reason why the description is invalid, such as sizes that contradict each other."""
    numbers: Callable[[Any], Iterator[float]]
    """Function from the description of a mixer or feed-forward that yields those of its numbers that must be
    finite and above 0, such as scale and eps."""


def norm_parameters(norm: Norm | None, name: str, size: int, parts: tuple[int, ...] = ()) -> Iterator[Param]:
    """Yields the parameters of a norm of `size` values: weight and bias, or those of the two that the norm
    has; nothing if `norm` is None. name: prefix of their names. parts: sizes of the vectors, such as one for
    each head, that checkpoints store as separate tensors."""
    if isinstance(norm, RmsNorm) or (norm is not None and norm.weight):
        yield Param(f"{name}.weight", (size,), parts)
    if isinstance(norm, LayerNorm) and norm.bias:
        yield Param(f"{name}.bias", (size,), parts)


def _attention_parameters(block: Attention, hidden: int) -> Iterator[Param]:
    """Yields the parameters of an attention. The matrices of query, key and value are joined to one along the
    rows, in that order. hidden: size of the residual stream."""
    query, value = block.heads * block.head_dim, block.kv_heads * block.head_dim
    rows, parts = query + 2 * value, (query, value, value)
    yield Param("attn.qkv.weight", (rows, hidden), parts)
    if block.qkv_bias:
        yield Param("attn.qkv.bias", (rows,), parts)
    if block.qk_norm is not None:
        for name, count in (("attn.q_norm", block.heads), ("attn.k_norm", block.kv_heads)):
            head_shape = (block.head_dim,) * count if block.qk_norm_span == "own_head" else ()
            size = block.head_dim * (1 if block.qk_norm_span == "head" else count)
            yield from norm_parameters(block.qk_norm, name, size, head_shape)
    if block.sinks:
        yield Param("attn.sinks", (block.heads,))
    yield Param("attn.o.weight", (hidden, query))
    if block.output_bias:
        yield Param("attn.o.bias", (hidden,))


def _attention_faults(block: Attention, ropes: Sequence[Rope]) -> Iterator[str]:
    window = 1 if block.window is None else block.window
    if min(block.heads, block.kv_heads, block.head_dim, window) < 1:
        yield "heads, kv_heads, head_dim and a window must be at least 1"
    elif block.heads % block.kv_heads:
        yield f"{block.kv_heads} key-value heads do not divide {block.heads} heads"
    if block.qk_norm_last and block.qk_norm_span == "heads":
        yield "a norm over all heads together must precede the rotation: qk_norm_last needs another span"
    if block.rope is None:
        return
    if block.rope >= len(ropes):
        yield f"it uses rope {block.rope}, but the model has {len(ropes)}"
    elif ropes[block.rope].dim > block.head_dim:
        yield f"{ropes[block.rope].dim} of {block.head_dim} dimensions rotated: must be even and fit"


def _attention_numbers(block: Attention) -> Iterator[float]:
    yield from (block.scale, block.softcap or 1.0, block.clip or 1.0)
    if block.qk_norm is not None:
        yield block.qk_norm.eps


def _dense_parameters(block: Dense, hidden: int) -> Iterator[Param]:
    """Yields the parameters of a dense feed-forward. The matrices of gate and up are joined to one along the
    rows, gate first. hidden: size of the residual stream."""
    rows, parts = (2 * block.size, (block.size, block.size)) if block.gated else (block.size, ())
    first = "mlp.gate_up" if block.gated else "mlp.up"
    yield Param(f"{first}.weight", (rows, hidden), parts)
    if block.bias:
        yield Param(f"{first}.bias", (rows,), parts)
    if block.activation == "xielu":
        yield Param("mlp.xielu", (4,), (1, 1, 1, 1))
    yield Param("mlp.down.weight", (hidden, block.size))
    if block.bias:
        yield Param("mlp.down.bias", (hidden,))


def _dense_faults(block: Dense, _: Sequence[Rope]) -> Iterator[str]:
    if block.size < 1:
        yield f"the feed-forward's size must be at least 1, found {block.size}"
    if block.gated and block.activation == "xielu":
        yield "xielu has no form with gates"


MIXERS: Mapping[type, Block] = {
    Attention: Block(
        "attention",
        _attention_parameters,
        lambda block: (2, block.kv_heads, block.head_dim),
        _attention_faults,
        _attention_numbers,
    ),
    LatentAttention: Block(
        "latent_attention",
        latent_parameters,
        lambda block: (block.cached,),
        latent_faults,
        latent_numbers,
    ),
}
"""Class that describes a kind of mixer, such as Attention -> the kind's name in JSON and the functions for
such descriptions: parameters, shape of the cache per token, error messages, and the numbers that must be
above 0."""
FEED_FORWARDS: Mapping[type, Block] = {
    Dense: Block("dense", _dense_parameters, lambda block: (), _dense_faults, lambda block: iter(())),
    Experts: Block("experts", experts_parameters, lambda block: (), experts_faults, experts_numbers),
}
"""Class that describes a kind of feed-forward, such as Dense -> the kind's name in JSON and the functions for
such descriptions: parameters, error messages, and the numbers that must be above 0. The function for the
cache returns (), since a feed-forward caches nothing."""


def blocks(layer: LayerSpec) -> tuple[tuple[Block, Mixer | FeedForward], ...]:
    """Returns two pairs (functions, description), the first for a layer's mixer and the second for its
    feed-forward. The description is an object such as an Attention; the functions, a `Block`, are those of
    the description's class."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    return (MIXERS[type(mixer)], mixer), (FEED_FORWARDS[type(feed_forward)], feed_forward)


@lru_cache(maxsize=1024)
def layer_parameters(layer: LayerSpec, hidden: int) -> tuple[Param, ...]:
    """Returns the parameters of a layer, in stored order, named without the layer's prefix. hidden: size of
    the residual stream.
    """
    params: list[Param] = []
    for prefix, (entry, block) in zip(("attn", "mlp"), blocks(layer), strict=True):
        if prefix == "attn" or layer.residual != "parallel_shared":
            params += norm_parameters(layer.norms.before, f"{prefix}_norm", hidden)
        params += entry.parameters(block, hidden)
        params += norm_parameters(layer.norms.after, f"{prefix}_post_norm", hidden)
    return tuple(params)


def cached_shape(layer: LayerSpec) -> tuple[tuple[int, ...], ...]:
    """Returns a tuple of the shapes of the arrays that a layer caches for each token, such as ((2, kv_heads,
    head_dim),) for one array of its key and value; () if it caches nothing."""
    shapes = (entry.cached(block) for entry, block in blocks(layer))
    return tuple(shape for shape in shapes if shape)


def layer_faults(layer: LayerSpec, ropes: Sequence[Rope]) -> list[str]:
    """Returns error messages for the reasons why a layer cannot be computed; [] if there are none. One
    message stands for all numbers that are not finite or not above 0. ropes: the model's rotary embeddings.
    """
    faults = [fault for entry, block in blocks(layer) for fault in entry.faults(block, ropes)]
    numbers = [number for entry, block in blocks(layer) for number in entry.numbers(block)]
    numbers += [norm.eps for norm in (layer.norms.before, layer.norms.after) if norm is not None]
    numbers.append(layer.residual_scale)
    return [*faults, *positive(numbers)]


def rope_faults(rope: Rope) -> list[str]:
    """Returns error messages for the fields of a rotary embedding that contradict each other or are invalid;
    [] if there are none. One message stands for all numbers that are not finite or not above 0."""
    faults = []
    if rope.dim % 2 or rope.dim < 1:
        faults.append(f"{rope.dim} dimensions rotated: must be even and at least 2")
    if any(len(table) != rope.dim // 2 for table in (rope.inv_freq, rope.inv_freq_long or rope.inv_freq)):
        faults.append(f"rope needs {rope.dim // 2} frequencies of each kind")
    together = (rope.inv_freq_long, rope.long_factor, rope.original_max_position)
    if len({item is None for item in together}) > 1:
        faults.append("rope needs inv_freq_long, long_factor and original_max_position together, or none")
    numbers = [*rope.inv_freq, *(rope.inv_freq_long or ()), rope.attention_factor]
    numbers += [number for number in (rope.long_factor, rope.original_max_position) if number is not None]
    numbers += [rope.query_scale.beta, rope.query_scale.length] if rope.query_scale else []
    return [*faults, *positive(numbers)]


def positive(numbers: Sequence[float]) -> list[str]:
    """Returns a list with one error message, which does not name the number, if any of a model's `numbers`,
    such as scales or the epsilon of a norm, is not finite or not above 0; otherwise []."""
    if all(math.isfinite(number) and number > 0 for number in numbers):
        return []
    return ["frequencies, scales, caps and the norm's epsilon must be finite and above 0"]
