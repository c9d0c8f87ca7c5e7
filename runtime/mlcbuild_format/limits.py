"""The sizes that a library is compiled for: the builder chooses them, and the runtime keeps within them."""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE


@dataclass(frozen=True)
class Limits:
    """The largest sizes of a library's calls; fields as in bundle.json and library.json."""

    context_window: int
    """Tokens of one sequence, prompt and answer together."""
    prefill_chunk: int
    """Tokens of one prefill call."""
    max_batch: int
    """Sequences of one call."""
    page_size: int = PAGE
    """Tokens in one page of the KV cache."""

    @property
    def rows(self) -> int:
        """Rows of any forward call."""
        return max(self.prefill_chunk, self.max_batch)

    @property
    def sequence_pages(self) -> int:
        """Pages that hold one sequence of context_window tokens."""
        return -(-self.context_window // self.page_size)

    @property
    def pages(self) -> int:
        """Pages that hold max_batch such sequences."""
        return self.sequence_pages * self.max_batch
