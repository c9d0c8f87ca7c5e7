"""Pools the hidden states of a text's tokens into one vector, the text's embedding, scaled to length 1."""

from __future__ import annotations

import numpy as np
from mlcbuild_format.bundle import Pooling
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Pooler:
    """Pools the hidden states of one text as they arrive, chunk by chunk."""

    def __init__(self, kind: Pooling) -> None:
        self.kind, self._count = kind, 0
        self._sum: NDArray[np.float64] = np.zeros(0)

    def clear(self) -> None:
        """Drops the hidden states of the text that were passed to `add` so far, so that the caller can pass
        those of all its tokens again."""
        self._count = 0

    def add(self, states: Floats) -> None:
        """Adds hidden states, float32 [n, hidden], of the next n tokens, at least one. For "mean" pooling
        they are summed in float64, so that the result does not depend on chunks; for "last" only the last one
        is kept."""
        if self.kind == "last":
            self._sum, self._count = states[-1].astype(np.float64), 1
            return
        total = states.sum(axis=0, dtype=np.float64)
        self._sum = total if self._count == 0 else self._sum + total
        self._count += len(states)

    def vector(self) -> Floats:
        """Returns the embedding, a float32 vector [hidden] scaled to Euclidean norm 1 (zeros stay zeros):
        the last of the hidden states that were passed to `add` (at least one), or their mean, by the kind of
        pooling."""
        return unit(self._sum / self._count)


def unit(vector: NDArray[np.floating]) -> Floats:
    """Returns a float32 vector scaled to length 1; a zero vector stays zero."""
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    return (wide / length if length else wide).astype(np.float32)
