"""Defines the layout of the paged KV cache: one tensor [layers, pages, 2, kv_heads, 16 * head_dim].

A page holds 16 tokens of one sequence. Keys (index 0) are stored dimension by dimension, [head_dim][16
tokens], so that the scores of 16 tokens are sums of vectors; values (index 1) token by token, [16][head_dim].
Latent attention has one row for each token: [layers, pages, 1, 1, 16 * dim], token by token.

In 8 bits, keys and values are int8 times a float32 scale for each token and kv head. The 16 scales of a
page's keys follow the keys, and the 16 scales of its values follow the values: the last dimension has 16 *
(head_dim + 4) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.tirx import Expr

SCALE_BYTES = 4
"""Number of bytes of a scale in an int8 KV cache: a float32 for each token's key, or value, in one KV
head."""
_ITEM_BYTES = {"float32": 4, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Heads:
    """The numbers and sizes of attention heads, by which attention kernels and the KV cache are laid out."""

    layers: int
    query: int
    """Number of query heads, a multiple of the number of KV heads."""
    kv: int
    """Number of key and value heads."""
    dim: int
    dtype: str
    """The type in which keys and values are stored: float32, float16, or int8 with scales."""
    latent: int = 0
    """Number of leading dimensions of the single key that are also its value (latent attention); 0: keys and
    values are separate.
    """

    @property
    def width(self) -> int:
        """Returns the number of columns of qkv, the tensor whose rows hold a token's queries, keys and
        values, or only its queries with latent attention.
        """
        return (self.query + (0 if self.latent else 2 * self.kv)) * self.dim

    @property
    def value_dim(self) -> int:
        """Returns the number of dimensions of one head's value vector."""
        return self.latent or self.dim

    @property
    def kinds(self) -> int:
        """Returns the number of tensors in a page of the KV cache: 2, keys and values; or 1 for latent
        attention, where one row for each token serves as both."""
        return 1 if self.latent else 2

    @property
    def group(self) -> int:
        """Returns the number of query heads that share one KV head."""
        return self.query // self.kv

    @property
    def has_scales(self) -> bool:
        """Returns True if keys and values are stored as int8 with scales."""
        return self.dtype == "int8"

    @property
    def item_bytes(self) -> int:
        """Returns the number of bytes of one stored number of a key or value, without scales: 4, 2 or 1."""
        return _ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Returns the number of bytes of one page of the KV cache, over all layers, scales included."""
        return self.layers * self.kinds * self.kv * self._page_columns * self.item_bytes

    @property
    def _page_columns(self) -> int:
        return PAGE * (self.dim + SCALE_BYTES * self.has_scales)

    def cache_shape(self, pages: Expr | int) -> tuple[Expr | int, ...]:
        return (self.layers, pages, self.kinds, self.kv, self._page_columns)
