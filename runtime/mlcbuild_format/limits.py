"""Defines the limits for which a library is compiled, such as the tokens of a sequence and the sequences of a
call; the runtime stays within them."""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE


@dataclass(frozen=True)
class Limits:
    """The largest sizes that a library's functions accept. Fields are named as in bundle.json and
    library.json.
    """

    context_window: int
    """Maximum number of tokens in one sequence, prompt and answer together."""
    prefill_chunk: int
    """Maximum number of prompt tokens, of all sequences together, that one call of the library computes."""
    max_batch: int
    """Maximum number of sequences that one call of the library computes."""
    page_size: int = PAGE
    """Number of tokens in one page of the KV cache."""

    @property
    def rows(self) -> int:
        """Returns the maximum number of rows (tokens) that one call of the model computes."""
        return max(self.prefill_chunk, self.max_batch)

    @property
    def sequence_pages(self) -> int:
        """Returns the number of KV cache pages that hold one sequence of context_window tokens, rounded
        up."""
        return -(-self.context_window // self.page_size)

    @property
    def pages(self) -> int:
        """Returns the number of KV cache pages that hold max_batch sequences of context_window tokens, each
        of which starts a page."""
        return self.sequence_pages * self.max_batch
