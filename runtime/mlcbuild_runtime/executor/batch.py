"""The inputs of one step of the model: tokens, KV cache pages and logit masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""A logit mask, int32 words: token t may be sampled if bit t % 32, counted from the lowest, of word t // 32
is set. It has at least as many words as the vocabulary needs."""
Masks = Sequence[tuple[int, Mask]]
"""Logit masks of one step of the model, as pairs (index of a row of logits; its mask, int32 words with one
bit per token, 1 if it is allowed); rows without a mask are left out."""


class ModelStep(NamedTuple):
    """New tokens of some sequences, as ragged rows, and the pages that hold their keys and values: the input
    of one step of the model.

    Sequence s owns tokens[indptr[s]:indptr[s+1]] and pages page_table[page_indptr[s]:page_indptr[s+1]];
    `lengths[s]` is its length in tokens after this step, the new ones included. These are plain lists because
    a decode step has just streamed the model through every cache: one NumPy call then costs more than
    handling all these numbers.
    """

    tokens: list[int]
    indptr: list[int]
    lengths: list[int]
    page_indptr: list[int]
    page_table: list[int]
    rows: list[int]
    """Indices, among the step's new tokens, of those whose logits are computed."""
    prompt: bool
    """True if the tokens belong to prompts. A library may have faster kernels for prompts, which round
    differently; using them only for prompts keeps an answer independent of the other sequences in its steps.
    """
    forks: Sequence[tuple[int, int, int]] = ()
    """Copies within the KV cache for branches of drafts, as (source page, destination page, number of tokens
    to copy from the start of the page). Each layer makes them in this order, after it has written the keys
    and values of the step's tokens and before attention reads the cache."""

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        counts: Sequence[int] | None = None,
        prompt: bool | None = None,
    ) -> ModelStep:
        """Returns the input of a step of the model. parts: (new tokens, length in tokens after them, KV cache
        pages) of each sequence; a negative page, which stands for one that no layer reads any more, becomes
        page 0.

        counts: for each sequence the number of its last new tokens that need logits (default: 1 for each).
        prompt: True if the tokens belong to prompts; by default if any sequence has more than one new token.
        """
        tokens, lengths, rows, table = list[int](), list[int](), list[int](), list[int]()
        indptr, page_indptr = [0], [0]
        for (new, length, pages), count in zip(parts, counts or [1] * len(parts), strict=True):
            tokens += new
            lengths.append(length)
            table += pages
            end = len(tokens)
            rows += range(end - count, end)
            indptr.append(end)
            page_indptr.append(len(table))
        if min(table, default=0) < 0:
            table = [max(0, page) for page in table]
        many = len(tokens) > len(parts)
        return cls(tokens, indptr, lengths, page_indptr, table, rows, many if prompt is None else prompt)

    def places(self, page_size: int) -> tuple[list[int], list[int]]:
        """Returns (positions, slots) of the step's new tokens: each token's position in its sequence, and its
        place in the KV cache, page * page_size + offset."""
        positions, slots = list[int](), list[int]()
        for s, length in enumerate(self.lengths):
            first = self.page_indptr[s]
            for position in range(length - self.indptr[s + 1] + self.indptr[s], length):
                page, offset = divmod(position, page_size)
                positions.append(position)
                slots.append(self.page_table[first + page] * page_size + offset)
        return positions, slots


class FollowingSteps(NamedTuple):
    """The inputs of the decode steps after the first one, where one device call executes several: random
    numbers, and the tokens that end a sequence. In each of these steps the input of a sequence is the token
    that the step before has sampled for it."""

    random_numbers: Sequence[Sequence[float]]
    """The random numbers, in [0, 1), with which tokens are sampled in the decode steps after the first one:
    one list for each of these steps, with a number for each sequence."""
    stops_at_eos: Sequence[bool]
    """For each sequence, True if it ends once it has sampled an end-of-sequence token (one of `eos_tokens`);
    no further step is executed after that for any sequence."""
    eos_tokens: Collection[int]


class NextInput(NamedTuple):
    """The input of one sequence in a decode step whose tokens the caller chooses: the token, the random
    number for sampling the next one, and a logit mask or None."""

    token: int
    random_number: float
    mask: Mask | None
