"""The forward pass of a ModelConfig in NumPy: the executable specification of what libraries compute.

Nothing here is packed, paged or fused. Weights are asked for one at a time, when they are needed, and not
kept: with a mapping that reads a tensor on access the peak is one layer, the activations and the cache.

Shapes: n new tokens, m positions in all (past and new), h heads, k key-value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mlcbuild.errors import CheckpointError
from mlcbuild.models import ModelConfig, frequencies, parameters

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Weights: TypeAlias = Mapping[str, Array]
"""Parameters under our names, as `parameters` shapes them, in any dtype that NumPy can cast from."""

_BLOCK = 1 << 24
"""Elements of a scratch array (attention scores, rows of the output matrix) computed at once."""


@dataclass(frozen=True)
class Past:
    """Keys (rotated) and values of the positions so far: for each layer [k, m, d]. The window does not
    shorten them."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def length(self) -> int:
        return int(self.keys[0].shape[1]) if self.keys else 0


EMPTY = Past((), ())


@dataclass(frozen=True)
class Reference:
    """A model to evaluate.

    `dtype` is that of all arithmetic. `context_window` chooses LongRoPE's frequencies, as it does for a
    library that is compiled for that window; None: the model's own maximum.
    """

    config: ModelConfig
    weights: Weights
    dtype: type[np.float32] | type[np.float64] = np.float32
    context_window: int | None = None


def logits(
    config: ModelConfig,
    weights: Weights,
    tokens: Sequence[int] | Array,
    *,
    dtype: type[np.float32] | type[np.float64] = np.float32,
    context_window: int | None = None,
) -> Array:
    """Logits [n, vocab] after each of the tokens, from an empty cache. Arguments as of Reference; raises
    what `hidden` raises."""
    model = Reference(config, weights, dtype, context_window)
    return head(model, hidden(model, tokens)[0])


def hidden(reference: Reference, tokens: Sequence[int] | Array, past: Past = EMPTY) -> tuple[Array, Past]:
    """Final hidden states [n, hidden] (after the last norm) of tokens that follow `past`, and the longer
    past. Raises ValueError for token ids outside the vocabulary, CheckpointError for weights that are
    missing or misshapen.
    """
    config, ids = reference.config, np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError("tokens must be a sequence of at least one integer")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids must be in 0..{config.vocab_size - 1}")
    shapes = {param.name: param.shape for param in parameters(config)}
    take = _Taker(reference, shapes)
    x = take.raw("embed.weight")[ids].astype(reference.dtype) * reference.dtype(config.embedding_scale)
    positions = np.arange(past.length, past.length + ids.size)
    turn = _rotation(reference, positions)
    keys, values = [], []
    for i in range(config.num_layers):
        own = (past.keys[i], past.values[i]) if past.length else None
        x, key, value = _layer(_Layer(config, take, i, positions, turn, own), x)
        keys.append(key)
        values.append(value)
    return _norm(config, x, take("norm.weight")), Past(tuple(keys), tuple(values))


def head(reference: Reference, states: Array) -> Array:
    """Logits [n, vocab] of final hidden states [n, hidden]."""
    config = reference.config
    name = "embed.weight" if config.tie_embeddings else "lm_head.weight"
    take = _Taker(reference, {name: (config.vocab_size, config.hidden_size)})
    found = np.empty((states.shape[0], config.vocab_size), reference.dtype)
    step = max(1, _BLOCK // config.hidden_size)
    matrix = take.raw(name)
    for start in range(0, config.vocab_size, step):
        rows = np.asarray(matrix[start : start + step], reference.dtype)
        found[:, start : start + step] = states @ rows.T
    return _softcap(found, config.logit_softcap)


def greedy(reference: Reference, prompt: Sequence[int], count: int, stop: Iterable[int] = ()) -> list[int]:
    """The `count` most likely next tokens, one after the other (lowest id first among equals), with a
    cache. Ends early after a token of `stop`."""
    ends, found = frozenset(stop), list[int]()
    tokens, past = list(prompt), EMPTY
    while len(found) < count and not (found and found[-1] in ends):
        states, past = hidden(reference, tokens, past)
        tokens = [int(np.argmax(head(reference, states[-1:])))]
        found += tokens
    return found


@dataclass(frozen=True)
class _Taker:
    """Weights by name, checked against their shape and cast."""

    reference: Reference
    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, name: str) -> Array:
        return np.asarray(self.raw(name), self.reference.dtype)

    def raw(self, name: str) -> Array:
        """In the dtype it comes in: a matrix of which only rows are needed is not cast whole."""
        try:
            found = self.reference.weights[name]
        except KeyError:
            raise CheckpointError(f"the weights hold no '{name}', which the model needs") from None
        if tuple(found.shape) != self.shapes[name]:
            raise CheckpointError(f"'{name}' must have shape {self.shapes[name]}, found {tuple(found.shape)}")
        return found


@dataclass(frozen=True)
class _Layer:
    """What one layer's pass needs beside its input."""

    config: ModelConfig
    take: _Taker
    index: int
    positions: Array
    turn: tuple[Array, Array]
    past: tuple[Array, Array] | None

    def __call__(self, name: str) -> Array:
        return self.take(f"layers.{self.index}.{name}")

    def linear(self, name: str, x: Array, bias: bool) -> Array:
        y: Array = x @ self(f"{name}.weight").T
        return y + self(f"{name}.bias") if bias else y


def _layer(layer: _Layer, x: Array) -> tuple[Array, Array, Array]:
    """Output [n, hidden], and the layer's keys and values [k, m, d]."""
    config = layer.config
    y, key, value = _attention(layer, _norm(config, x, layer("attn_norm.weight")))
    if config.post_norms:
        y = _norm(config, y, layer("attn_post_norm.weight"))
    x = x + y
    y = _mlp(layer, _norm(config, x, layer("mlp_norm.weight")))
    if config.post_norms:
        y = _norm(config, y, layer("mlp_post_norm.weight"))
    return x + y, key, value


def _norm(config: ModelConfig, x: Array, weight: Array) -> Array:
    """RMSNorm over the last axis."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=x.dtype)
    root = np.sqrt(mean + x.dtype.type(config.norm_eps))
    found: Array = x / root * (weight + x.dtype.type(config.norm_offset))
    return found


def _mlp(layer: _Layer, x: Array) -> Array:
    config = layer.config
    gate, up = np.split(layer.linear("mlp.gate_up", x, config.mlp_bias), 2, axis=-1)
    active = _silu(gate) if config.activation == "silu" else _gelu_tanh(gate)
    return layer.linear("mlp.down", active * up, config.mlp_bias)


def _silu(x: Array) -> Array:
    """x * sigmoid(x), by tanh, which does not overflow."""
    half = x.dtype.type(0.5)
    found: Array = half * x * (1 + np.tanh(half * x))
    return found


def _gelu_tanh(x: Array) -> Array:
    half, cubic, root = (x.dtype.type(value) for value in (0.5, 0.044715, np.sqrt(2 / np.pi)))
    found: Array = half * x * (1 + np.tanh(root * (x + cubic * x * x * x)))
    return found


def _attention(layer: _Layer, x: Array) -> tuple[Array, Array, Array]:
    config, n = layer.config, x.shape[0]
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = layer.linear("attn.qkv", x, config.qkv_bias).reshape(n, heads + 2 * kv_heads, dim)
    query, key, value = np.split(qkv.transpose(1, 0, 2), [heads, heads + kv_heads])
    if config.qk_norm:
        query = _norm(config, query, layer("attn.q_norm.weight"))
        key = _norm(config, key, layer("attn.k_norm.weight"))
    query, key = _rotate(query, layer.turn), _rotate(key, layer.turn)
    if layer.past is not None:
        key = np.concatenate([layer.past[0], key], axis=1)
        value = np.concatenate([layer.past[1], value], axis=1)
    mixed = np.empty_like(query)
    group = heads // kv_heads
    for k in range(kv_heads):
        own = slice(k * group, (k + 1) * group)
        mixed[own] = _attend(layer, query[own], key[k], value[k])
    flat = mixed.transpose(1, 0, 2).reshape(n, heads * dim)
    return layer.linear("attn.o", flat, config.output_bias), key, value


def _attend(layer: _Layer, query: Array, key: Array, value: Array) -> Array:
    """Attention of the query heads [g, n, d] of one group over its keys and values [m, d]."""
    config, window = layer.config, layer.config.windows[layer.index]
    mixed = np.empty_like(query)
    places = np.arange(key.shape[0])
    step = max(1, _BLOCK // (query.shape[0] * key.shape[0]))
    for start in range(0, query.shape[1], step):
        part = slice(start, start + step)
        at = layer.positions[part, None]
        scores = query[:, part] @ key.T * query.dtype.type(config.attention_scale)
        scores = _softcap(scores, config.attention_softcap)
        hidden = places > at
        if window is not None:
            hidden |= places <= at - window
        scores[:, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed[:, part] = scores @ value
    return mixed


def _softcap(x: Array, cap: float | None) -> Array:
    if cap is None:
        return x
    limit = x.dtype.type(cap)
    found: Array = np.tanh(x / limit) * limit
    return found


def _rotation(reference: Reference, positions: Array) -> tuple[Array, Array]:
    """cos and sin [n, rope.dim / 2], both times the attention factor."""
    window = reference.context_window or reference.config.max_position
    inv_freq, factor = frequencies(reference.config.rope, window)
    dtype = reference.dtype
    angles = positions.astype(dtype)[:, None] * np.asarray(inv_freq, dtype)
    return np.cos(angles) * dtype(factor), np.sin(angles) * dtype(factor)


def _rotate(x: Array, turn: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + rope.dim / 2) of each head; [.., n, d] in and out."""
    cos, sin = turn
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
