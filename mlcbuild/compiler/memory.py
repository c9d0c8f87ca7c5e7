"""How much memory a library needs when it runs: weights and cache exactly, workspace as it was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tvm import IRModule, relax
from tvm.ir import Op

from mlcbuild.compiler.decoder import Decoder

BLOCK = 4096
"""The runtime's pool hands out multiples of this and keeps what is returned."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    kv_page: int
    """One page of 16 tokens over all layers."""
    kv_cache: int
    """max_batch sequences of context_window tokens."""
    workspace: int
    """Everything between kernels, with the logits of max_batch rows. Taken once and kept."""


def estimate(decoder: Decoder, mod: IRModule) -> Memory:
    """From a module whose buffers have just been planned for the library's limits."""
    page = decoder.parts.heads.page_bytes
    return Memory(
        weights=sum(_size(tensor.shape, tensor.dtype) for tensor in decoder.tensors),
        kv_page=page,
        kv_cache=page * decoder.limits.pages,
        workspace=_workspace(decoder, mod),
    )


def _size(shape: Iterable[int], dtype: str) -> int:
    return int(np.prod(list(shape), dtype=np.int64)) * np.dtype(dtype).itemsize


def _workspace(decoder: Decoder, mod: IRModule) -> int:
    """Blocks of the pool, which are told apart by size: of each size as many as are held at one time.

    A forward function holds the embeddings, then what the trunk and one layer hold, then its own.
    """
    planned = {
        str(name.name_hint): _blocks(function)
        for name, function in mod.functions.items()
        if isinstance(function, relax.Function)
    }
    trunk, embedded = planned["trunk"], planned["embed"]
    moments = [embedded + trunk + found for name, found in planned.items() if name.startswith("layer")]
    # The trunk's result is in one of its blocks.
    moments += [
        embedded + trunk + found
        for name, found in planned.items()
        if name.endswith(("fill", "decode", "hidden_states"))
    ]
    most: Counter[int] = Counter()
    for moment in moments:
        most |= moment
    return sum(size * count for size, count in _touched(decoder, most).items())


def _touched(decoder: Decoder, blocks: Counter[int]) -> Counter[int]:
    """Logits are planned for every row of a chunk; those of max_batch rows are ever written when serving."""
    row = decoder.config.vocab_size * 4
    planned, used = (_rounded(count * row) for count in (decoder.limits.rows, decoder.limits.max_batch))
    found = Counter(blocks)
    if planned != used:
        found[used] = max(found[used], found.pop(planned, 0))
    return found


def _blocks(function: relax.Function) -> Counter[int]:
    found: Counter[int] = Counter()

    def look(node: object) -> None:
        if not isinstance(node, relax.Call) or not isinstance(node.op, Op):
            return
        if str(node.op.name) == "relax.memory.alloc_storage":
            found[_rounded(int(node.args[0].values[0]))] += 1

    relax.analysis.post_order_visit(function, look)
    return found


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
