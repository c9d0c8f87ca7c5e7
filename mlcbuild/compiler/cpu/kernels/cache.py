"""The paged KV cache: one tensor [layers, pages, 2, kv_heads, 16 * head_dim], laid out for the kernels.

A page holds 16 tokens of one sequence. Keys (index 0) are stored dimension by dimension, [head_dim][16
tokens], so that the scores of 16 tokens are sums of vectors; values (index 1) token by token, [16][head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.tirx import Expr


@dataclass(frozen=True)
class Heads:
    """The shapes of heads that attention and the KV cache share."""

    layers: int
    query: int
    """Number of query heads; a multiple of `kv`."""
    kv: int
    """Number of key and value heads."""
    dim: int
    dtype: str
    """Stored type of keys and values."""

    @property
    def width(self) -> int:
        """Columns of a qkv row: queries, keys and values."""
        return (self.query + 2 * self.kv) * self.dim

    @property
    def group(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.query // self.kv

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the KV cache, over all layers."""
        return self.layers * 2 * self.kv * PAGE * self.dim * (2 if self.dtype == "float16" else 4)

    def cache_shape(self, pages: Expr | int) -> tuple[Expr | int, ...]:
        return (self.layers, pages, 2, self.kv, PAGE * self.dim)
