"""The blocks of a layer in NumPy, and the table that says which function computes each kind.

Shapes: n new tokens, m positions in all (past and new), h heads, k key-value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mlcbuild.bundles.reference_experts import experts
from mlcbuild.models import Activation, Attention, Dense, Experts, LayerSpec, RmsNorm

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
State: TypeAlias = tuple[Array, ...]
"""A mixer's memory of the positions so far; () before the first. Attention: keys (rotated) and values,
each [k, m, d], which a window does not shorten."""

BLOCK = 1 << 24
"""Elements of a scratch array (attention scores, rows of the output matrix) computed at once."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one layer's blocks beside the rows that they work on."""

    weight: Callable[..., Array]
    """(name of a parameter within the layer, expert?) -> its values, or those of one expert."""
    positions: Array
    """[n]"""
    rotations: tuple[tuple[Array, Array], ...]
    """For each rope of the model cos and sin [n, dim / 2], both times the attention factor."""
    state: State

    def linear(self, name: str, x: Array, has_bias: bool) -> Array:
        """Returns x times a weight, plus its bias if it has one."""
        y: Array = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if has_bias else y


def layer(spec: LayerSpec, inputs: Inputs, x: Array) -> tuple[Array, State]:
    """Returns the residual stream [n, hidden] after a layer, and the state of its mixer."""
    mixer, feed_forward = MIXERS[type(spec.mixer)], FEED_FORWARDS[type(spec.feed_forward)]
    y, state = mixer(spec.mixer, inputs, norm(spec.norms.before, x, inputs.weight("attn_norm.weight")))
    if spec.norms.after is not None:
        y = norm(spec.norms.after, y, inputs.weight("attn_post_norm.weight"))
    x = x + y
    y = feed_forward(spec.feed_forward, inputs, norm(spec.norms.before, x, inputs.weight("mlp_norm.weight")))
    if spec.norms.after is not None:
        y = norm(spec.norms.after, y, inputs.weight("mlp_post_norm.weight"))
    return x + y, state


def norm(spec: RmsNorm, x: Array, weight: Array) -> Array:
    """Normalizes the last axis."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=x.dtype)
    root = np.sqrt(mean + x.dtype.type(spec.eps))
    scaled: Array = x / root * (weight + x.dtype.type(spec.offset))
    return scaled


def softcap(x: Array, cap: float | None) -> Array:
    """Returns cap * tanh(x / cap), or x without a cap."""
    if cap is None:
        return x
    limit = x.dtype.type(cap)
    capped: Array = np.tanh(x / limit) * limit
    return capped


def _dense(spec: Dense, inputs: Inputs, x: Array) -> Array:
    gate, up = np.split(inputs.linear("mlp.gate_up", x, spec.bias), 2, axis=-1)
    return inputs.linear("mlp.down", ACTIVATIONS[spec.activation](gate) * up, spec.bias)


def _silu(x: Array) -> Array:
    """Returns x * sigmoid(x), by tanh, which does not overflow."""
    half = x.dtype.type(0.5)
    active: Array = half * x * (1 + np.tanh(half * x))
    return active


def _gelu_tanh(x: Array) -> Array:
    half, cubic, root = (x.dtype.type(value) for value in (0.5, 0.044715, np.sqrt(2 / np.pi)))
    active: Array = half * x * (1 + np.tanh(root * (x + cubic * x * x * x)))
    return active


def _attention(spec: Attention, inputs: Inputs, x: Array) -> tuple[Array, State]:
    n, heads, kv_heads = x.shape[0], spec.heads, spec.kv_heads
    qkv = inputs.linear("attn.qkv", x, spec.qkv_bias).reshape(n, heads + 2 * kv_heads, spec.head_dim)
    query, key, value = np.split(qkv.transpose(1, 0, 2), [heads, heads + kv_heads])
    if spec.qk_norm is not None:
        query = norm(spec.qk_norm, query, inputs.weight("attn.q_norm.weight"))
        key = norm(spec.qk_norm, key, inputs.weight("attn.k_norm.weight"))
    rotation = inputs.rotations[spec.rope]
    query, key = _rotate(query, rotation), _rotate(key, rotation)
    if inputs.state:
        key = np.concatenate([inputs.state[0], key], axis=1)
        value = np.concatenate([inputs.state[1], value], axis=1)
    mixed = np.empty_like(query)
    group = heads // kv_heads
    for k in range(kv_heads):
        own = slice(k * group, (k + 1) * group)
        mixed[own] = _attend(spec, inputs.positions, query[own], (key[k], value[k]))
    flat = mixed.transpose(1, 0, 2).reshape(n, heads * spec.head_dim)
    return inputs.linear("attn.o", flat, spec.output_bias), (key, value)


def _attend(spec: Attention, positions: Array, query: Array, cached: tuple[Array, Array]) -> Array:
    """Returns attention of the query heads [g, n, d] of one group over its keys and values [m, d]."""
    key, value = cached
    mixed = np.empty_like(query)
    places = np.arange(key.shape[0])
    step = max(1, BLOCK // (query.shape[0] * key.shape[0]))
    for start in range(0, query.shape[1], step):
        part = slice(start, start + step)
        at = positions[part, None]
        scores = softcap(query[:, part] @ key.T * query.dtype.type(spec.scale), spec.softcap)
        hidden = places > at
        if spec.window is not None:
            hidden |= places <= at - spec.window
        scores[:, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed[:, part] = scores @ value
    return mixed


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + dim / 2) of each head; [.., n, d] in and out."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


MIXERS: Mapping[type, Callable[[Any, Inputs, Array], tuple[Array, State]]] = {Attention: _attention}
"""Class of a mixer -> function from (spec, inputs, normalized rows) to (rows to add, new state)."""
FEED_FORWARDS: Mapping[type, Callable[[Any, Inputs, Array], Array]] = {
    Dense: _dense,
    Experts: lambda spec, inputs, x: experts(spec, inputs.weight, ACTIVATIONS[spec.activation], x),
}
"""Class of a feed-forward -> function from (spec, inputs, normalized rows) to rows to add."""
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}
