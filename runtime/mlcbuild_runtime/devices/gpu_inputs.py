"""The int32 inputs of a call of a GPU program, laid out in one block that is uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.program import Program, evaluate
from numpy.typing import NDArray

from mlcbuild_runtime.executor.batch import Masks, ModelStep

QUERY_TILE = 32
"""Number of prompt tokens in one tile of the attention kernels for prompts; must equal `QUERIES` of the
compiler's kernels."""


class InputBlock:
    """The memory block that holds the int32 inputs of a call of a GPU program; it is filled again for each
    call."""

    def __init__(self, program: Program, page_size: int) -> None:
        (buffer,) = (candidate for candidate in program.buffers.values() if candidate.kind == "inputs")
        self._words = np.zeros(evaluate(buffer.size, program.sizes) // 4, np.int32)
        self._starts = {name: section.start for name, section in program.inputs.items()}
        self._page_size = page_size

    def _set(self, name: str, values: Sequence[int]) -> None:
        start = self._starts[name]
        self._words[start : start + len(values)] = values

    def fill(self, step: ModelStep, first: int, last: int, rows: Sequence[int]) -> NDArray[np.int32]:
        """Returns the int32 words to upload to the GPU program's buffer of inputs (tokens, positions, KV
        cache slots, page table ...) so that it computes the new tokens `first` to `last` - 1 of a step. rows:
        indices of the tokens whose logits are computed, counted from `first` on. The words are a view of this
        block, which the next call overwrites."""
        positions, slots = step.places(self._page_size)
        first_page = [
            step.page_indptr[sequence]
            for sequence in range(len(step.lengths))
            for _ in range(step.indptr[sequence], step.indptr[sequence + 1])
        ]
        self._set("count", [0])
        part = slice(first, last)
        self._set("tokens", step.tokens[part])
        self._set("positions", positions[part])
        self._set("slots", slots[part])
        self._set("first_page", first_page[part])
        self._set("rows", rows)
        self._set("tiles", [word for tile in tiles(step) for word in tile] if step.prompt else [])
        self._set("forks", [word for fork in step.forks for word in fork])
        self._set("page_table", step.page_table)
        return self._words[: self._starts["page_table"] + len(step.page_table)]

    def rows(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """Returns the int32 words to upload to a GPU program's buffer of inputs, so that it computes the
        logits of more of the tokens that it has computed last, from the hidden states that are still on the
        GPU. rows: indices of these tokens, counted from the first token computed last. The words are a view
        of this block, which the next call overwrites."""
        self._set("rows", rows)
        return self._words[: self._starts["rows"] + len(rows)]


def tiles(step: ModelStep) -> list[tuple[int, int]]:
    """Returns (index of the first token, number of tokens) of each tile into which attention divides a step's
    tokens; a tile has up to QUERY_TILE (32) tokens of one sequence."""
    return [
        (start, min(QUERY_TILE, end - start))
        for begin, end in zip(step.indptr, step.indptr[1:], strict=False)
        for start in range(begin, end, QUERY_TILE)
    ]


def mask_words(masks: Masks, vocab: int) -> NDArray[np.int32]:
    """Returns logit masks as the int32 words that a GPU program reads: for each mask the index of its row of
    logits, then one bit per token of the vocabulary, lowest token first, 1 if it is allowed."""
    words = -(-vocab // abi.MASK_WORD)
    block = np.empty((len(masks), 1 + words), np.int32)
    for index, (row, mask) in enumerate(masks):
        block[index, 0], block[index, 1:] = row, mask[:words]
    return block.ravel()
