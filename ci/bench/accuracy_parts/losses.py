"""Measures how far the logits of engines are from the float32 reference of a model, over the tokens of a
text: KL divergence, share of equal most likely tokens, and perplexity."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlcbuild_runtime.text.tokenizer import Tokenizer
from numpy.typing import NDArray

from mlcbuild.bundles import gguf_text
from mlcbuild.bundles import reference as forward
from mlcbuild.checkpoints import exact_weights, gguf_config
from mlcbuild.checkpoints.checkpoint_views import views_for
from mlcbuild.models import ModelConfig, parsing

LONGEST = 512
"""Context window in tokens of the bundles that are measured."""
SEQUENCE, TOKENS = 400, 1200
"""SEQUENCE: maximum number of tokens in one sequence of a measured text. TOKENS: maximum number in all its
sequences together."""

Logits = NDArray[Any]


@dataclass(frozen=True)
class Reference:
    """The tokens on which engines are compared, as sequences, and for each sequence the model's float32
    logits after each of its tokens, [tokens, vocabulary]."""

    sequences: list[list[int]]
    logits: list[Logits]
    vocabulary: int
    parameters: int
    """Number of parameters of the model."""


@dataclass(frozen=True)
class Loss:
    """How far one engine with one weights format is from the model's float32 reference, over the tokens of a
    text. kl: mean over all positions of the KL divergence in nats, sum of p * log(p / q), with the
    reference's probabilities p and the engine's q. perplexity: exp of the engine's mean -log(probability) of
    the text's next token."""

    name: str
    size: int
    """Size of the weights in bytes."""
    kl: float
    agree: float
    """Share of a text's positions at which the engine's most likely next token is that of the float32
    reference.
    """
    perplexity: float
    parameters: int


def reference(model: Path, text: Path, area: Path) -> Reference:
    """Returns the first TOKENS (1200) tokens of a text, all if it has fewer, in sequences of SEQUENCE (400; a
    last one of a single token is left out), and the float32 logits of a checkpoint (a directory or a GGUF
    file) after each token. The logits are stored in the directory `area`, and later runs with the same
    checkpoint path and tokens read them there: changed weights at this path are not noticed."""
    config, tokens = _read(model, text.read_text(encoding="utf-8"))
    tokens = tokens[:TOKENS]
    sequences = [tokens[start : start + SEQUENCE] for start in range(0, len(tokens), SEQUENCE)]
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    names = parsing.tensor_names(config)
    weights = exact_weights.checkpoint(model, config, names, views_for(None))
    count = sum(int(np.prod(weights[name].shape)) for name in weights)
    identity = json.dumps([str(model.resolve()), sequences])
    kept = area / f"reference-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.npy"
    if not kept.is_file():
        np.save(kept, np.concatenate([forward.logits(config, weights, ids) for ids in sequences]))
    ends = np.cumsum([len(ids) for ids in sequences])[:-1]
    return Reference(sequences, np.split(np.load(kept), ends), config.vocab_size, count)


def _read(model: Path, text: str) -> tuple[ModelConfig, list[int]]:
    if model.suffix != ".gguf":
        config = parsing.parse(json.loads((model / "config.json").read_text()))
        return config, list(Tokenizer.load(model).encode(text))
    with tempfile.TemporaryDirectory() as temporary_directory:
        gguf_text.tokenizer({"file": model.name}, {"checkpoint": model.parent}, Path(temporary_directory))
        return gguf_config.read_config(model), list(Tokenizer.load(Path(temporary_directory)).encode(text))


def exact(expected: Reference) -> Loss:
    """Returns the float32 reference compared with itself, as a Loss named "float32": a KL divergence of 0, a
    share of 1, 4 bytes per parameter, and the perplexity to which those of the engines are compared."""
    logits = iter(expected.logits)
    return loss("float32", 4 * expected.parameters, expected, lambda tokens: next(logits))


def loss(name: str, size: int, expected: Reference, score: Callable[[list[int]], Logits]) -> Loss:
    """Compares an engine's logits with those of the reference, and returns the means over all positions of
    the text (a Loss). name, size: the engine's name and the bytes of its weights; expected: the token
    sequences and the reference's logits; score: function from a token sequence to the engine's logits
    [tokens, vocabulary].
    """
    kl = nats = 0.0
    agree = positions = predicted = 0
    for tokens, reference_logits in zip(expected.sequences, expected.logits, strict=True):
        for start, p, q in _parts(reference_logits, score(tokens)):
            kl += float((np.exp(p) * (p - q)).sum())
            agree += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())
            positions += len(p)
            following = tokens[start + 1 : start + 1 + len(p)]
            nats -= float(q[np.arange(len(following)), following].sum())
            predicted += len(following)
    perplexity = float(np.exp(nats / predicted))
    return Loss(name, size, kl / positions, agree / positions, perplexity, expected.parameters)


def _parts(expected: Logits, actual: Logits) -> Iterator[tuple[int, Logits, Logits]]:
    """Yields (index of the first position, expected log-probabilities, actual ones) for up to 64 positions of
    a sequence at a time, both float64 [positions, vocabulary]: arrays for all positions would take gigabytes.
    expected, actual: logits of the whole sequence, [positions, vocabulary]."""
    for start in range(0, len(expected), 64):
        yield start, *(_log_softmax(logits[start : start + 64]) for logits in (expected, actual))


def _log_softmax(logits: Logits) -> Logits:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
