"""What a library is built for."""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild_format.abi import PAGE


@dataclass(frozen=True)
class Limits:
    """What the library is built for; the caller keeps within them."""

    context_window: int
    """Positions of one sequence."""
    prefill_chunk: int
    """Rows of one forward call."""
    max_batch: int
    """Sequences of one forward call."""

    @property
    def rows(self) -> int:
        """Rows of any forward call."""
        return max(self.prefill_chunk, self.max_batch)

    @property
    def pages(self) -> int:
        """Pages that hold max_batch sequences of context_window positions."""
        return -(-self.context_window // PAGE) * self.max_batch

    @property
    def bounds(self) -> dict[str, int]:
        """Largest value of each symbolic dimension, by name: memory is planned for these."""
        return {"n": self.rows, "q": self.rows, "b": self.max_batch, "p": self.pages}
