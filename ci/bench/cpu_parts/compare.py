"""Writes logits of the float32 reference (argv: checkpoint, number of tokens, file for the result as raw
float32). Or compares logits with them (argv: `compare`, file of the expected ones, file of the actual ones,
size of the vocabulary) and prints their KL divergence, relative error and share of equal most likely tokens
as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from child import prompt
from numpy.typing import NDArray

from mlcbuild.bundles.reference import logits
from mlcbuild.checkpoints.exact_weights import checkpoint as weights_of
from mlcbuild.models import parsing


def reference(checkpoint: str, count: str, out: str) -> None:
    root = Path(checkpoint)
    config = parsing.parse(json.loads((root / "config.json").read_text()))
    tokens = prompt(int(count), config.vocab_size)
    weights = weights_of(root, config, parsing.tensor_names(config))
    logits(config, weights, tokens).astype(np.float32).tofile(out)


def compare(expected: str, actual: str, vocabulary: str) -> None:
    p, q = (np.fromfile(path, np.float32).reshape(-1, int(vocabulary)) for path in (expected, actual))
    print(json.dumps(figures(p, q)))


def figures(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> dict[str, float]:
    """Compares logits with the expected ones, both [n, vocabulary], and returns name -> figure:

    kl      KL(expected || actual) of the next-token distributions in nats, mean over the n positions
    agree   share of positions with the same most likely token
    error   root mean square of the differences over that of the expected logits; before, the mean of each
            position is subtracted
    """
    p, q = expected.astype(np.float64), actual.astype(np.float64)
    p -= p.mean(axis=-1, keepdims=True)
    q -= q.mean(axis=-1, keepdims=True)
    error = float(np.sqrt(((p - q) ** 2).mean() / (p**2).mean()))
    agree = float((p.argmax(axis=-1) == q.argmax(axis=-1)).mean())
    p -= np.log(np.exp(p).sum(axis=-1, keepdims=True))
    q -= np.log(np.exp(q).sum(axis=-1, keepdims=True))
    kl = float((np.exp(p) * (p - q)).sum(axis=-1).mean())
    return {"kl": kl, "error": error, "agree": agree}


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare(*sys.argv[2:])
    else:
        reference(*sys.argv[1:])
