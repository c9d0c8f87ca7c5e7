"""Describes multi-head latent attention as data: a layer caches one short vector per token, which all heads
share.

The layer's input x of a token becomes a latent c = norm(A x) and a rotated key r, which all heads share. Head
h has the key (K_h^T c, r) and the value V_h c; the matrices A, K_h and V_h are weights. Programs apply these
products to the query and to the result instead: they compute the query (K_h q, q_rotated) over the cached
vectors (c, r), and V_h times the weighted sum of c.

DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlcbuild.models.param import Param


@dataclass(frozen=True)
class LatentAttention:
    """The description of one layer's multi-head latent attention. The query of each head consists of its
    unrotated dimensions, followed by its rotated ones."""

    heads: int
    latent: int
    """Number of values in the latent vector that is cached for a token."""
    head_dim: int
    """Number of dimensions of a head's queries and keys that are not rotated."""
    rope_dim: int
    """Number of rotated dimensions of a head's queries, and of the key that all heads share."""
    value_dim: int
    scale: float
    """Factor by which the dot products of queries and keys are multiplied before the softmax."""
    eps: float
    """The eps of the RMS norms of the cached latents and of the latents of queries."""
    query_latent: int = 0
    """Number of values in the latent that queries are computed from; 0: they are computed from the layer's
    input."""
    rope: int | None = 0
    """Index of the layer's rotary embedding in ModelConfig.ropes; None is refused, as latent attention needs
    one."""
    window: int | None = None
    """Number of most recent positions that a query attends to, including its own; None: all."""
    bias: bool = False
    """True if the matrices that project the layer's input to latents, the short vectors of multi-head latent
    attention from which queries, keys and values are computed, have biases."""
    output_bias: bool = False

    @property
    def cached(self) -> int:
        """Returns the number of values that one layer caches for each token: the latent vector, and the
        rotated key that all heads share."""
        return self.latent + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Returns the number of dimensions of one head's query as its weights yield it, before it is
        projected to the cached latents: `head_dim` unrotated ones and `rope_dim` rotated ones."""
        return self.head_dim + self.rope_dim


def latent_parameters(block: LatentAttention, hidden: int) -> Iterator[Param]:
    """Yields the parameters of one layer's multi-head latent attention, without those of the layer's norms
    and feed-forward. attn.k_b is a tensor [heads, latent, head_dim], attn.v_b one [heads, value_dim, latent].
    hidden: size of the residual stream."""
    queries = block.heads * block.query_dim
    if block.query_latent:
        yield Param("attn.q_a.weight", (block.query_latent, hidden))
        if block.bias:
            yield Param("attn.q_a.bias", (block.query_latent,))
        yield Param("attn.q_a_norm.weight", (block.query_latent,))
        yield Param("attn.q_b.weight", (queries, block.query_latent))
    else:
        yield Param("attn.q.weight", (queries, hidden))
    yield Param("attn.kv_a.weight", (block.cached, hidden))
    if block.bias:
        yield Param("attn.kv_a.bias", (block.cached,))
    yield Param("attn.kv_a_norm.weight", (block.latent,))
    yield Param("attn.k_b.weight", (block.heads, block.latent, block.head_dim))
    yield Param("attn.v_b.weight", (block.heads, block.value_dim, block.latent))
    yield Param("attn.o.weight", (hidden, block.heads * block.value_dim))
    if block.output_bias:
        yield Param("attn.o.bias", (hidden,))


def latent_faults(block: LatentAttention, ropes: Sequence[Any]) -> Iterator[str]:
    """Yields an error message for each reason why the description of a latent attention is invalid: a size
    below 1, or an index `rope` that is None, has no entry in `ropes`, or selects a rotary embedding of
    another size or with a query scale. ropes: the model's rotary embeddings."""
    window = 1 if block.window is None else block.window
    sizes = (block.heads, block.latent, block.head_dim, block.rope_dim, block.value_dim, window)
    if min(sizes) < 1:
        yield "heads, latents, the dimensions of heads and a window must be at least 1"
    if block.rope is None:
        yield "latent attention needs a rope for the key that its heads share"
    elif block.rope >= len(ropes):
        yield f"it uses rope {block.rope}, but the model has {len(ropes)}"
    elif ropes[block.rope].dim != block.rope_dim:
        yield f"{ropes[block.rope].dim} of {block.rope_dim} rotated dimensions have an angle"
    elif ropes[block.rope].query_scale is not None:
        yield "latent attention has no scale for queries by position"


def latent_numbers(block: LatentAttention) -> Iterator[float]:
    """Yields the numbers in the description of a latent attention that must be finite and above 0: its scale
    and the eps of its norms."""
    yield from (block.scale, block.eps)
