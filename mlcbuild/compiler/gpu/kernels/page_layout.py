"""Defines the layout of a layer's KV cache on a GPU: pages of 16 tokens, keys before values, or latents that
are both.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE
from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    bind,
    half,
    kernel,
    pack_halves,
    put,
    strided,
    when,
)


@dataclass(frozen=True)
class CacheSpec:
    """The KV cache of one layer on a GPU: [pages][keys, values][KV heads][16 tokens][head_dim], float32 or
    pairs of float16. With latent attention a page holds keys only, which contain the values."""

    heads: int
    kv_heads: int
    head_dim: int
    half: bool
    latent: int = 0
    """Number of leading values of a key that are also its value (latent attention); 0: values are stored
    separately and are as long as keys.
    """

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def words(self) -> int:
        """Returns the number of 32-bit words that one head's key or value vector takes in the KV cache."""
        return self.head_dim // 2 if self.half else self.head_dim

    @property
    def page_words(self) -> int:
        return (1 if self.latent else 2) * self.kv_heads * PAGE * self.words

    @property
    def width(self) -> int:
        """Returns the number of values in the row that holds the queries, keys and values of one token, over
        all heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def declare(self, k: KernelBuilder) -> Value:
        dtype = "uint32" if self.half else "float32"
        return k.buffer("pages", (k.size("pages_count"), self.page_words), dtype)

    def place(self, which: Value | int, head: Value, offset: Value) -> Value:
        """Returns the index of the 32-bit word in a page at which the vector of a token begins. which: 0 for
        a key, 1 for a value, which makes no difference for latents; head: KV head; offset: position of the
        token in the page.
        """
        which = 0 if self.latent else which
        return bind(((which * self.kv_heads + head) * PAGE + offset) * self.words)

    def append(
        self, pages: Value, vector: Value, at: tuple[Value | int, Value | int, Value], tx: Value
    ) -> None:
        """Emits the store of a token's key or value vector from shared memory in the KV cache of a layer. at:
        (0 for a key or 1 for a value, KV head, page * 16 + index of the token in the page); tx: index of the
        thread.
        """
        which, head, slot = at
        start = self.place(which, head, slot % PAGE)

        def store(word: Value) -> None:
            value = pack_halves(vector[2 * word], vector[2 * word + 1]) if self.half else vector[word]
            put(pages, value, slot // PAGE, start + word)

        strided(self.words, tx, WORKGROUP, store)

    def pair(self, pages: Value, page: Value, word: Value) -> list[Value]:
        """Returns the float32 numbers in one 32-bit word of a KV cache page: two for a cache of float16, one
        for float32.
        """
        stored = bind(pages[page, word])
        return [half(stored, False), half(stored, True)] if self.half else [stored]

    def number(self, pages: Value, page: Value, start: Value, index: Value) -> Value:
        """Returns, as float32, element `index` of the key or value vector that begins at word `start` of a
        page of the KV cache.
        """
        if not self.half:
            return pages[page, start + index]
        return half(bind(pages[page, start + index // 2]), index % 2 == 1)


@dataclass(frozen=True)
class InputPlaces:
    """The offsets, in int32 words, of the inputs of a call of a GPU program in the one buffer that holds them
    all.
    """

    words: int
    tokens: int
    positions: int
    slots: int
    first_page: int
    """Offset, in int32 words of the buffer of inputs, of the list that holds, for each row, the index in
    `page_table` of its sequence's first page.
    """
    rows: int
    tiles: int
    """Offset, in int32 words of the buffer of inputs, of the list of tiles of prompts: pairs (first row,
    number of rows).
    """
    forks: int
    count: int
    """Offset, in int32 words of the buffer of inputs, of the number of steps that a decode loop has
    completed.
    """
    page_table: int

    def declare(self, k: KernelBuilder) -> Value:
        return k.buffer("inputs", (self.words,), "int32")


def fork(name: str, spec: CacheSpec, inputs: InputPlaces) -> KernelBuilder:
    """Returns the kernel that copies the first tokens of pages of the KV cache to other pages, as the forks
    (source page, destination page, number of tokens) among the inputs list them. A thread copies the same
    word of a page for all forks, in their order, so a fork may read what an earlier one wrote."""
    with kernel(name) as k:
        block, pages = inputs.declare(k), spec.declare(k)
        count = k.scalar("count")
        blocks = -(-spec.page_words // WORKGROUP)
        with k.launch(WORKGROUP, ("mul", blocks, ("min", "count", 1))) as (bx, _, tx):
            word = bind(bx * WORKGROUP + tx)
            with when(word < spec.page_words):
                offset = bind(word // spec.words % PAGE)
                with T.serial(count) as index:
                    entry = bind(inputs.forks + 3 * index)
                    with when(offset < block[entry + 2]):
                        put(pages, pages[block[entry], word], block[entry + 1], word)
    return k
