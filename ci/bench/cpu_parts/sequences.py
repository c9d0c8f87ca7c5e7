"""Measures prefill and decoding of engines that compute a batch of tokens in each call, where the caller
describes every token by its id, its position and its sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from child import CONTEXT, clock, prompt, since

Row = tuple[int, int, int, bool]
"""One row of a batch: (token id, position, index of the sequence, True if the row's logits are computed)."""
ROOM = CONTEXT + 256
"""Number of tokens of one sequence for which the engine's KV cache has memory: those of its context, and 256,
one for each decode step of a measurement."""
ROWS = 512
"""Maximum number of tokens, of all sequences together, that one call of the engine computes."""


class Batches(Protocol):
    """The interface of an engine with a loaded model and a KV cache for several sequences. It computes one
    batch of tokens after the other.
    """

    def run(self, rows: list[Row]) -> None:
        """Computes a batch of tokens. Raises SystemExit, which ends the engine's process, if the engine
        fails."""
        ...

    def logits(self, row: int) -> np.ndarray:
        """Returns the logits of a row of the last batch, float32 [vocabulary], valid until the next batch is
        computed. row: its index in the batch; its logits must have been requested there."""
        ...

    def forget(self, sequence: int, first: int) -> None:
        """Removes the tokens of a sequence from position `first` on from an engine's KV cache. sequence:
        index of the sequence.
        """
        ...


class Sequences:
    """Measures prefill and decoding of an engine that computes batches, by the interface of all measured
    engines (`child.Engine`). The contexts of sequences stay in the KV cache from one call of `decode` to the
    next, and are computed again only after `prefill` or `save_logits`."""

    def __init__(self, model: Batches, vocabulary: int) -> None:
        self.model, self.vocabulary, self.filled = model, vocabulary, 0

    def _fill(self, tokens: list[int], sequence: int, every: bool = False) -> None:
        self.model.forget(sequence, 0)
        last = len(tokens) - 1
        self.model.run([(token, i, sequence, every or i == last) for i, token in enumerate(tokens)])

    def prefill(self, tokens: list[int]) -> None:
        self._fill(tokens, 0)
        self.filled = 0

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        for sequence in range(self.filled, batch):
            self._fill(prompt(CONTEXT, self.vocabulary, sequence), sequence)
        self.filled = max(self.filled, batch)
        samples = []
        for step in range(steps):
            start = clock()
            self.model.run([(500 + step, CONTEXT + step, s, True) for s in range(batch)])
            for row in range(batch):
                self.model.logits(row).argmax()
            samples.append(since(start))
        for sequence in range(batch):
            self.model.forget(sequence, CONTEXT)
        return samples

    def save_logits(self, tokens: list[int], path: str) -> None:
        self._fill(tokens, 0, every=True)
        np.stack([self.model.logits(i) for i in range(len(tokens))]).astype(np.float32).tofile(path)
        self.filled = 0
