"""Computes the attention and the feed-forward of a model's layer in NumPy. The tables MIXERS and
FEED_FORWARDS map the class of each one's description to the function that computes it.

Shapes: n new tokens, m positions in all (past and new), h heads, k key-value heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mlcbuild.bundles.reference_experts import experts
from mlcbuild.models import (
    Activation,
    Attention,
    Dense,
    Experts,
    LatentAttention,
    LayerNorm,
    LayerSpec,
    Norm,
    RmsNorm,
)
from mlcbuild.models.alibi import slopes
from mlcbuild.models.rounding import bf16

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
State: TypeAlias = tuple[Array, ...]
"""The arrays that a layer's attention stores of the positions so far; () before the first one. Ordinary
attention: (rotated) keys and values, each [KV heads, positions, head_dim], which an attention window does not
shorten. Latent attention: latents and rotated keys, each [positions, ..].
"""

BLOCK = 1 << 24
"""Maximum number of elements of a scratch array (attention scores, rows of the output matrix) that is
computed at once.
"""


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines of a rotary embedding at the positions of n new tokens, each [n, rotated
    dimensions / 2], and the factor, [n] or None, by which the query at each position is multiplied.
    """

    cos: Array
    """Cosines of the rotary embedding's angles times its attention factor, [n positions, rotated dimensions /
    2]. `sin` has the same shape and factor.
    """
    sin: Array
    query_scale: Array | None
    """Factor by which the query at each of n positions is multiplied, [n]; None: queries are not scaled."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one layer's attention and feed-forward, except for the rows of the residual stream:
    weights, positions, rotary embeddings, and stored keys and values.
    """

    weight: Callable[..., Array]
    """Function from (name of a parameter within the layer, optional index into a stack of matrices, such as
    that of an expert or a head) to the parameter's values, or to the matrix with this index.
    """
    positions: Array
    """Positions of the n new tokens in their sequence, [n]; the first token of a sequence has position 0."""
    rotations: tuple[Rotation, ...]
    """For each rotary embedding of the model, its cosines and sines at the positions of the new tokens, each
    [n, rotated dimensions / 2], and its factors for queries. A layer's attention refers to one of them by
    index.
    """
    state: State
    rounded: Callable[[str, Array], Array] = lambda name, rows: rows
    """Function from (name of a matrix within the layer, rows that the layer multiplies with this matrix) to
    these rows after the rounding that the product applies to them, such as rounding to 8 bits. By default
    rows are not rounded.
    """

    def linear(self, name: str, x: Array, has_bias: bool) -> Array:
        """Returns x W^T [n, outputs] for x [n, inputs], rounded as products with W round it, and the weight W
        called `<name>.weight`, plus the bias `<name>.bias` if `has_bias` is True.
        """
        y: Array = self.rounded(f"{name}.weight", x) @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if has_bias else y


def layer(spec: LayerSpec, inputs: Inputs, x: Array) -> tuple[Array, State]:
    """Computes one decoder layer, and returns (residual stream [n, hidden] after it, the layer's attention
    state with the n new positions added, such as keys and values). spec: the layer's description; x: residual
    stream [n, hidden] before the layer.
    """
    mixer, feed_forward = MIXERS[type(spec.mixer)], FEED_FORWARDS[type(spec.feed_forward)]
    scale = x.dtype.type(spec.residual_scale)
    y, state = mixer(spec.mixer, inputs, norm(spec.norms.before, x, inputs.weight, "attn_norm"))
    mixed = x + norm(spec.norms.after, y, inputs.weight, "attn_post_norm") * scale
    source = mixed if spec.residual == "sequential" else x
    name = "attn_norm" if spec.residual == "parallel_shared" else "mlp_norm"
    y = feed_forward(spec.feed_forward, inputs, norm(spec.norms.before, source, inputs.weight, name))
    return mixed + norm(spec.norms.after, y, inputs.weight, "mlp_post_norm") * scale, state


def norm(spec: Norm | None, x: Array, weights: Callable[[str], Array], name: str) -> Array:
    """Returns x with its last axis normalized, by LayerNorm or RMSNorm as `spec` describes, or x itself if
    `spec` is None. weights: function from a parameter's name to its values; the norm's parameters, where
    `spec` has them, are `<name>.weight` and `<name>.bias`.
    """
    if spec is None:
        return x
    if isinstance(spec, LayerNorm):
        x = x - np.mean(x, axis=-1, keepdims=True, dtype=x.dtype)
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=x.dtype)
    scaled: Array = x / np.sqrt(mean + x.dtype.type(spec.eps))
    if isinstance(spec, LayerNorm) and not spec.weight:
        return scaled
    scaled = scaled * (_rows(weights(f"{name}.weight"), x) + x.dtype.type(spec.offset))
    if isinstance(spec, LayerNorm) and spec.bias:
        scaled = scaled + _rows(weights(f"{name}.bias"), x)
    return scaled


def _rows(values: Array, x: Array) -> Array:
    """Returns the weights or biases of a norm in a shape that NumPy broadcasts to x [heads, n, head_dim]:
    [head_dim] if all heads share them, or [heads, 1, head_dim].
    """
    return values if values.size == x.shape[-1] else values.reshape(x.shape[0], 1, x.shape[-1])


def softcap(x: Array, cap: float | None) -> Array:
    """Returns cap * tanh(x / cap), or x itself if `cap` is None."""
    if cap is None:
        return x
    limit = x.dtype.type(cap)
    capped: Array = np.tanh(x / limit) * limit
    return capped


def _dense(spec: Dense, inputs: Inputs, x: Array) -> Array:
    if spec.gated:
        gate, up = np.split(inputs.linear("mlp.gate_up", x, spec.bias), 2, axis=-1)
        return inputs.linear("mlp.down", ACTIVATIONS[spec.activation](gate) * up, spec.bias)
    y = inputs.linear("mlp.up", x, spec.bias)
    if spec.activation == "xielu":
        y = _xielu(y, inputs.weight("mlp.xielu"))
    else:
        y = ACTIVATIONS[spec.activation](y)
    return inputs.linear("mlp.down", y, spec.bias)


def _silu(x: Array) -> Array:
    """Returns the SiLU of x, x * sigmoid(x), computed through tanh, which does not overflow."""
    half = x.dtype.type(0.5)
    active: Array = half * x * (1 + np.tanh(half * x))
    return active


def _gelu_tanh(x: Array) -> Array:
    half, cubic, root = (x.dtype.type(value) for value in (0.5, 0.044715, np.sqrt(2 / np.pi)))
    active: Array = half * x * (1 + np.tanh(root * (x + cubic * x * x * x)))
    return active


def _gelu(x: Array) -> Array:
    """Returns the exact GELU of x: x * (1 + erf(x / sqrt 2)) / 2."""
    tails = np.frompyfunc(lambda value: 0.5 * math.erfc(-value * math.sqrt(0.5)), 1, 1)
    active: Array = x * tails(x).astype(x.dtype)
    return active


def _relu(x: Array) -> Array:
    above: Array = np.maximum(x, x.dtype.type(0))
    return above


def _xielu(x: Array, scalars: Array) -> Array:
    alpha_p, alpha_n, beta, eps = scalars
    above, below = np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n)
    active: Array = np.where(x > 0, above * x * x, (np.expm1(np.minimum(x, eps)) - x) * below) + beta * x
    return active


def _attention(spec: Attention, inputs: Inputs, x: Array) -> tuple[Array, State]:
    n, heads, kv_heads = x.shape[0], spec.heads, spec.kv_heads
    flat = inputs.linear("attn.qkv", x, spec.qkv_bias)
    qkv = flat.reshape(n, heads + 2 * kv_heads, spec.head_dim)
    query, key, value = np.split(qkv.transpose(1, 0, 2), [heads, heads + kv_heads])
    value = _clipped(spec, value)
    rotation = None if spec.rope is None else inputs.rotations[spec.rope]
    query, key = (_turned(spec, inputs, rotation, rows, name) for rows, name in ((query, "q"), (key, "k")))
    if rotation is not None and rotation.query_scale is not None:
        query = query * rotation.query_scale[:, None]
    if inputs.state:
        key = np.concatenate([inputs.state[0], key], axis=1)
        value = np.concatenate([inputs.state[1], value], axis=1)
    mixed = np.empty_like(query)
    group = heads // kv_heads
    for k in range(kv_heads):
        group_heads = slice(k * group, (k + 1) * group)
        biases = _Biases(spec, inputs, group_heads)
        mixed[group_heads] = _attend(spec, biases, query[group_heads], (key[k], value[k]))
    flat = mixed.transpose(1, 0, 2).reshape(n, heads * spec.head_dim)
    return inputs.linear("attn.o", flat, spec.output_bias), (key, value)


def _turned(spec: Attention, inputs: Inputs, rotation: Rotation | None, x: Array, name: str) -> Array:
    """Returns queries or keys x [heads, n, head_dim] after clipping, normalization and rotary embedding, as
    far as the layer has them, in the order that it requires. rotation: cosines and sines; None: no rotary
    embedding. name: "q" or "k", which selects the norm.
    """

    def normed(rows: Array) -> Array:
        if spec.qk_norm_span != "heads" or spec.qk_norm is None:
            return norm(spec.qk_norm, rows, inputs.weight, f"attn.{name}_norm")
        flat = rows.transpose(1, 0, 2).reshape(x.shape[1], -1)
        flat = norm(spec.qk_norm, flat, inputs.weight, f"attn.{name}_norm")
        return flat.reshape(x.shape[1], x.shape[0], x.shape[2]).transpose(1, 0, 2)

    if spec.qk_norm_last:
        return normed(_rotate(_clipped(spec, x), rotation))
    return _rotate(_clipped(spec, normed(x)), rotation)


def _clipped(spec: Attention, x: Array) -> Array:
    """Returns x limited to -spec.clip .. spec.clip, or x itself if the attention layer does not clip
    (spec.clip is None).
    """
    return x if spec.clip is None else np.clip(x, -spec.clip, spec.clip)


@dataclass(frozen=True)
class _Biases:
    """The changes that a layer makes to the attention scores of some query heads before masks (scale, soft
    cap, ALiBi biases), and the sinks of these heads."""

    spec: Attention
    inputs: Inputs
    heads: slice

    def scores(self, products: Array, part: slice) -> Array:
        """Returns the attention scores [g, rows, m] of g query heads, for some of the new tokens and m keys,
        scaled, soft-capped and with ALiBi biases, before masking. products: dot products of queries and keys,
        [g, rows, m]; part: slice that selects the tokens of these queries from all new tokens.
        """
        spec, dtype = self.spec, products.dtype
        keys = np.arange(products.shape[-1])
        if spec.alibi == "bfloat16":
            biases = [[bf16(slope * bf16(key)) for key in keys] for slope in self._slopes()]
            products = products + np.array(biases, dtype)[:, None]
        scores = softcap(products * dtype.type(spec.scale), spec.softcap)
        if spec.alibi == "exact":
            away = (keys - self.inputs.positions[part, None]).astype(dtype)
            scores = scores + np.array(self._slopes(), dtype)[:, None, None] * away
        return scores

    def _slopes(self) -> tuple[float, ...]:
        return slopes(self.spec.heads, self.spec.alibi)[self.heads]

    def sinks(self) -> Array | None:
        """Returns the attention sinks of a group of g query heads, [g, 1, 1]: extra scores that take part in
        the softmax without a value. None if the layer has none.
        """
        return self.inputs.weight("attn.sinks")[self.heads, None, None] if self.spec.sinks else None


def _attend(spec: Attention, biases: _Biases, query: Array, cached: tuple[Array, Array]) -> Array:
    """Returns the softmax attention [g, n, d] of g query heads that share keys and values. Each of n queries
    attends to the positions up to its own, or with a window to the last `spec.window` of these; both include
    its own. query: [g, n, d]; cached: (keys, values) of all m positions, [m, d] each; biases: scale, ALiBi,
    soft cap and sinks of these heads.
    """
    key, value = cached
    mixed = np.empty((*query.shape[:2], value.shape[-1]), query.dtype)
    places, sinks = np.arange(key.shape[0]), biases.sinks()
    step = max(1, BLOCK // (query.shape[0] * key.shape[0]))
    for start in range(0, query.shape[1], step):
        part = slice(start, start + step)
        at = biases.inputs.positions[part, None]
        scores = biases.scores(query[:, part] @ key.T, part)
        hidden = places > at
        if spec.window is not None:
            hidden |= places <= at - spec.window
        scores[:, hidden] = -np.inf
        highest = scores.max(axis=-1, keepdims=True)
        scores -= highest
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        scores /= total if sinks is None else total + np.exp(sinks - highest)
        mixed[:, part] = scores @ value
    return mixed


def _latent_attention(spec: LatentAttention, inputs: Inputs, x: Array) -> tuple[Array, State]:
    """Computes multi-head latent attention (MLA) with explicit keys and values for every head, which compiled
    programs avoid. Returns (rows [n, hidden] to add to the residual stream, state: latents [m, latent size]
    and rotated keys [m, rotated dimensions] of all positions so far).
    """
    n, weight, eps = x.shape[0], inputs.weight, RmsNorm(spec.eps)
    if spec.query_latent:
        first = norm(eps, inputs.linear("attn.q_a", x, spec.bias), weight, "attn.q_a_norm")
        flat = inputs.linear("attn.q_b", first, False)
    else:
        flat = inputs.linear("attn.q", x, False)
    rotation = None if spec.rope is None else inputs.rotations[spec.rope]
    unrotated, turned = np.split(flat.reshape(n, spec.heads, -1).transpose(1, 0, 2), [spec.head_dim], axis=-1)
    query = np.concatenate([unrotated, _rotate(turned, rotation)], axis=-1)
    latent, shared = np.split(inputs.linear("attn.kv_a", x, spec.bias), [spec.latent], axis=-1)
    latent, shared = norm(eps, latent, weight, "attn.kv_a_norm"), _rotate(shared[None], rotation)[0]
    if inputs.state:
        latent, shared = (np.concatenate(pair) for pair in zip(inputs.state, (latent, shared), strict=True))
    attention = Attention(1, 1, spec.query_dim, spec.scale, rope=None, window=spec.window)
    mixed = np.empty((n, spec.heads, spec.value_dim), x.dtype)
    for head in range(spec.heads):
        keys = np.concatenate([latent @ weight("attn.k_b.weight", head), shared], axis=-1)
        values = latent @ weight("attn.v_b.weight", head).T
        biases = _Biases(attention, inputs, slice(0, 1))
        mixed[:, head] = _attend(attention, biases, query[head : head + 1], (keys, values))[0]
    return inputs.linear("attn.o", mixed.reshape(n, -1), spec.output_bias), (latent, shared)


def _rotate(x: Array, rotation: Rotation | None) -> Array:
    """Returns x [..., n, d] with a rotary embedding applied to its first `dim` dimensions, by rotating the
    pairs (i, i + dim / 2); the other dimensions are unchanged. rotation: cosines and sines, [n, dim / 2]
    each, whose shape determines `dim`; None: x is returned unchanged.
    """
    if rotation is None:
        return x
    half = rotation.cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    cos, sin = rotation.cos, rotation.sin
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


MIXERS: Mapping[type, Callable[[Any, Inputs, Array], tuple[Array, State]]] = {
    Attention: _attention,
    LatentAttention: _latent_attention,
}
"""Class of a layer's attention, such as Attention -> function from (its description, the layer's inputs,
normalized rows [n, hidden]) to (rows [n, hidden] to add to the residual stream, state of the positions so
far).
"""
FEED_FORWARDS: Mapping[type, Callable[[Any, Inputs, Array], Array]] = {
    Dense: _dense,
    Experts: lambda spec, inputs, x: experts(spec, inputs.weight, ACTIVATIONS[spec.activation], x),
}
"""Class of a layer's feed-forward, such as Dense -> function from (its description, the layer's inputs,
normalized rows [n, hidden]) to rows [n, hidden] to add to the residual stream.
"""
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu": _relu,
    "relu2": lambda x: np.square(_relu(x)),
}
