"""What a decoder-only transformer is, as data.

A ModelConfig holds exactly what changes the numbers of a forward pass: nothing about tokens' meaning,
names, sources or training. Two fine-tunes of one architecture have equal configs and share every library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, resolved: no spelling of any checkpoint is left in it.

    Angles of the pair (i, i + dim/2) at position p are p * inv_freq[i]; cos and sin are multiplied by
    `attention_factor`. `inv_freq_long` and `long_factor`, where present, replace the short ones when the
    model's context window exceeds `original_max_position` (LongRoPE; chosen once per library). All three
    are present or none. Use `frequencies` to choose.
    """

    dim: int
    """Leading dimensions of each head that are rotated; even, at most head_dim. The rest pass unchanged."""
    inv_freq: tuple[float, ...]
    """dim / 2 frequencies, each exactly representable in float32."""
    attention_factor: float = 1.0
    inv_freq_long: tuple[float, ...] | None = None
    long_factor: float | None = None
    """Attention factor that goes with inv_freq_long (not the list that checkpoints call long_factor)."""
    original_max_position: int | None = None


def frequencies(rope: Rope, context_window: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and attention factor of a library that is built for `context_window` positions."""
    if rope.inv_freq_long is None or rope.long_factor is None or rope.original_max_position is None:
        return rope.inv_freq, rope.attention_factor
    if context_window <= rope.original_max_position:
        return rope.inv_freq, rope.attention_factor
    return rope.inv_freq_long, rope.long_factor


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention and a gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: Activation
    rope: Rope
    attention_scale: float
    """Multiplies q.k before the soft cap and the softmax."""
    windows: tuple[int | None, ...]
    """For each layer the number of most recent positions (itself included) a query sees; None: all.
    A window may be larger than any context; it then has no effect."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of each query and key head, before rope (Qwen3)."""
    norm_offset: float = 0.0
    """Added to every RMSNorm weight before use (Gemma: 1)."""
    post_norms: bool = False
    """RMSNorm on the output of attention and of the MLP, before the residual addition (Gemma 2)."""
    embedding_scale: float = 1.0
    """Multiplies the embedding, not the tied output matrix (Gemma: sqrt(hidden_size), rounded to the
    checkpoint's dtype as transformers does)."""
    attention_softcap: float | None = None
    """c * tanh(score / c) on attention scores."""
    logit_softcap: float | None = None


@dataclass(frozen=True)
class Param:
    """One parameter as the mathematics sees it, before any packing. Matrices are [out, in]."""

    name: str
    shape: tuple[int, ...]


def parameters(config: ModelConfig) -> tuple[Param, ...]:
    """Every parameter of the model, in the one order that signatures, weights and libraries use.

    Query, key and value matrices are one matrix `qkv` [(heads + 2 kv_heads) * head_dim, hidden], in that
    order; gate and up are one matrix `gate_up` [2 * intermediate, hidden], gate first.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * dim
    found = [Param("embed.weight", (config.vocab_size, hidden))]
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        found.append(Param(f"{layer}.attn_norm.weight", (hidden,)))
        found.append(Param(f"{layer}.attn.qkv.weight", (qkv, hidden)))
        if config.qkv_bias:
            found.append(Param(f"{layer}.attn.qkv.bias", (qkv,)))
        if config.qk_norm:
            found.append(Param(f"{layer}.attn.q_norm.weight", (dim,)))
            found.append(Param(f"{layer}.attn.k_norm.weight", (dim,)))
        found.append(Param(f"{layer}.attn.o.weight", (hidden, config.num_heads * dim)))
        if config.output_bias:
            found.append(Param(f"{layer}.attn.o.bias", (hidden,)))
        if config.post_norms:
            found.append(Param(f"{layer}.attn_post_norm.weight", (hidden,)))
        found.append(Param(f"{layer}.mlp_norm.weight", (hidden,)))
        found.append(Param(f"{layer}.mlp.gate_up.weight", (2 * inner, hidden)))
        if config.mlp_bias:
            found.append(Param(f"{layer}.mlp.gate_up.bias", (2 * inner,)))
        found.append(Param(f"{layer}.mlp.down.weight", (hidden, inner)))
        if config.mlp_bias:
            found.append(Param(f"{layer}.mlp.down.bias", (hidden,)))
        if config.post_norms:
            found.append(Param(f"{layer}.mlp_post_norm.weight", (hidden,)))
    found.append(Param("norm.weight", (hidden,)))
    if not config.tie_embeddings:
        found.append(Param("lm_head.weight", (config.vocab_size, hidden)))
    return tuple(found)


LARGEST_MODEL = 10**13
"""Parameters. Beyond it some size is surely a mistake."""


def faults(config: ModelConfig) -> list[str]:
    """What makes a config no model: fields that contradict each other, one sentence each."""
    rope, found = config.rope, []
    if config.num_heads % config.num_kv_heads:
        found.append(f"{config.num_kv_heads} key-value heads do not divide {config.num_heads} heads")
    if rope.dim % 2 or not 0 < rope.dim <= config.head_dim:
        found.append(f"{rope.dim} of {config.head_dim} dimensions rotated: must be even and fit")
    if any(len(f) != rope.dim // 2 for f in (rope.inv_freq, rope.inv_freq_long or rope.inv_freq)):
        found.append(f"rope needs {rope.dim // 2} frequencies of each kind")
    together = (rope.inv_freq_long, rope.long_factor, rope.original_max_position)
    if len({item is None for item in together}) > 1:
        found.append("rope needs inv_freq_long, long_factor and original_max_position together, or none")
    if len(config.windows) != config.num_layers:
        found.append(f"{len(config.windows)} windows for {config.num_layers} layers")
    numbers = [*rope.inv_freq, *(rope.inv_freq_long or ()), rope.attention_factor, rope.long_factor or 1.0]
    numbers += [config.norm_eps, config.attention_scale, config.embedding_scale]
    numbers += [config.attention_softcap or 1.0, config.logit_softcap or 1.0]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        found.append("frequencies, scales, caps and the norm's epsilon must be finite and above 0")
    if not found and (count := sum(math.prod(param.shape) for param in parameters(config))) > LARGEST_MODEL:
        found.append(f"the sizes make {count:.1e} parameters; one of them must be wrong")
    return found


LARGEST_DEFAULT = 4096
"""Tokens of the context window where nobody asks for one: its KV cache is allocated in full."""


def context_window(config: ModelConfig, requested: int | None) -> int:
    """The window of a library: what was requested, or the model's own up to LARGEST_DEFAULT."""
    return min(config.max_position, LARGEST_DEFAULT) if requested is None else requested
