"""What goes into a step of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""Bits of tokens that may be chosen, from the lowest on, in no fewer words than the vocabulary takes."""
Masks = Sequence[tuple[int, Mask]]
"""Of rows, those that have one."""


class Step(NamedTuple):
    """New tokens of some sequences, as ragged rows, and where their keys and values live.

    Sequence s owns tokens[indptr[s]:indptr[s+1]] and pages page_table[page_indptr[s]:page_indptr[s+1]];
    `lengths[s]` is its length after this step. `rows` are the rows of `tokens` whose logits are wanted.
    These are plain lists: a decoding step has streamed the model through every cache, and each call of NumPy
    then costs more than all these numbers.
    """

    tokens: list[int]
    indptr: list[int]
    lengths: list[int]
    page_indptr: list[int]
    page_table: list[int]
    rows: list[int]
    prompt: bool
    """The tokens are prompts'. A library may have a faster way for these, which rounds differently, so that
    what a sequence gets must not depend on how many tokens others bring."""
    forks: Sequence[tuple[int, int, int]] = ()
    """(from page, to page, tokens): what pages begin with, in this order, once all new tokens are there; for
    branches of drafts."""

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        wanted: Sequence[int] | None = None,
        prompt: bool | None = None,
    ) -> Step:
        """From (new tokens, length after them, pages) of each sequence. A negative page is one that no layer
        looks at any more.
        wanted: of how many of its last tokens the logits are wanted, for each sequence (default: 1).
        prompt: by default where any sequence has more than one new token."""
        tokens, lengths, rows, table = list[int](), list[int](), list[int](), list[int]()
        indptr, page_indptr = [0], [0]
        for (new, length, pages), count in zip(parts, wanted or [1] * len(parts), strict=True):
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
        """Of each new token: its position in its sequence; page * page_size + offset where its key and value
        go."""
        positions, slots = list[int](), list[int]()
        for s, length in enumerate(self.lengths):
            first = self.page_indptr[s]
            for position in range(length - self.indptr[s + 1] + self.indptr[s], length):
                page, offset = divmod(position, page_size)
                positions.append(position)
                slots.append(self.page_table[first + page] * page_size + offset)
        return positions, slots


class Onward(NamedTuple):
    """Steps that follow a step of decoding, in which each sequence has the token that was chosen for it."""

    numbers: Sequence[Sequence[float]]
    """For each such step, the random number of each sequence's way."""
    heeds: Sequence[bool]
    """Of each sequence: no step follows once it has an end."""
    ends: Collection[int]


class Further(NamedTuple):
    """What a sequence has in a step of decoding that follows another one."""

    token: int
    number: float
    """The random number of its way."""
    mask: Mask | None
