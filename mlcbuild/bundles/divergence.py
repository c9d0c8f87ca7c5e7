"""Computes the KL divergence between next-token distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Returns log softmax of logits [n, vocab] over the last axis, in float64."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns KL(p || q) in nats at each of n positions, at least 0. p, q: logarithms of probabilities [n,
    vocab], which must be finite: -inf makes that position's result NaN or, if only `q` has it, infinite."""
    import numpy as np

    kl: NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    return kl
