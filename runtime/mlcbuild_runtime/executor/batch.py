"""The inputs of a step: tokens, pages, logit masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""A logit mask: one bit for each token, from the lowest on, set where the token may be drawn. It has no fewer
words than the vocabulary needs."""
Masks = Sequence[tuple[int, Mask]]
"""(row, mask) of each row that has a mask."""


class Step(NamedTuple):
    """New tokens of some sequences, as ragged rows, and where their keys and values live.

    Sequence s owns tokens[indptr[s]:indptr[s+1]] and pages page_table[page_indptr[s]:page_indptr[s+1]];
    `lengths[s]` is its length after this step. These are plain lists: a decode step has streamed the model
    through every cache, and each call of NumPy then costs more than all these numbers.
    """

    tokens: list[int]
    indptr: list[int]
    lengths: list[int]
    page_indptr: list[int]
    page_table: list[int]
    rows: list[int]
    """Indices into `tokens` whose logits are computed."""
    prompt: bool
    """The tokens belong to prompts. A library may have faster kernels for these, which round differently, so
    that an answer must not depend on how many tokens the other sequences of a step have."""
    forks: Sequence[tuple[int, int, int]] = ()
    """(from page, to page, tokens): copies of the beginnings of pages, made in this order after all new keys
    and values are in the cache; for branches of drafts."""

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        counts: Sequence[int] | None = None,
        prompt: bool | None = None,
    ) -> Step:
        """Returns a step of (new tokens, length after them, pages) of each sequence. A negative page is one
        that no layer reads any more.

        counts: for each sequence, how many of its last tokens need logits (default: 1).
        prompt: by default true if any sequence has more than one new token.
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

    @property
    def is_decode(self) -> bool:
        """Every sequence has one new token."""
        return len(self.tokens) == len(self.lengths)

    def places(self, page_size: int) -> tuple[list[int], list[int]]:
        """Returns, for each new token, its position in its sequence and its slot in the KV cache, which is
        page * page_size + offset."""
        positions, slots = list[int](), list[int]()
        for s, length in enumerate(self.lengths):
            first = self.page_indptr[s]
            for position in range(length - self.indptr[s + 1] + self.indptr[s], length):
                page, offset = divmod(position, page_size)
                positions.append(position)
                slots.append(self.page_table[first + page] * page_size + offset)
        return positions, slots


class FollowingSteps(NamedTuple):
    """Decode steps that follow another one at once: each sequence continues with the token drawn for it."""

    random_numbers: Sequence[Sequence[float]]
    """One row for each following step: the random number of each sequence."""
    stops_at_eos: Sequence[bool]
    """For each sequence: no step follows once it has drawn one of `eos_tokens`."""
    eos_tokens: Collection[int]


class NextInput(NamedTuple):
    """The input of one sequence in a guided decode step."""

    token: int
    random_number: float
    mask: Mask | None
