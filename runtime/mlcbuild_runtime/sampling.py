"""Logits to a token. A request's choices depend on its own logits and seed, whatever shares its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime.errors import EngineError

Floats = NDArray[np.float32]
Weights = NDArray[np.float64]
_BLOCK = 256
"""Of tokens: the square root of a large vocabulary, about."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. The filters apply in this order: top_k, min_p, top_p."""

    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Keep this many of the most likely tokens, and those as likely as the last of them; 0: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one."""
    seed: int | None = None
    choice: int = 0
    """Which of several answers to one request this is: each has its own random numbers."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from the logits of all tokens that are in the answer."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it, or multiplied where they are negative."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""

    @property
    def adjusts(self) -> bool:
        plain = self.frequency_penalty == self.presence_penalty == 0 and self.repetition_penalty == 1
        return not plain or bool(self.bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def filters(self) -> bool:
        """Whether a token can be chosen depends on the likelihood of others."""
        return not self.greedy and (self.top_k > 0 or self.min_p > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Logprob:
    token: int
    logprob: float


Score = tuple[Logprob, tuple[Logprob, ...]]
"""A token's log-probability, and those of the most likely tokens in its place."""


def generator(sampling: Sampling) -> np.random.Generator:
    """The random numbers of one request: the same for the same seed, on every machine."""
    if sampling.seed is None:
        return np.random.default_rng()
    seed = sampling.seed & (1 << 64) - 1
    return np.random.default_rng([seed, sampling.choice] if sampling.choice else seed)


class Numbers:
    """Random numbers of one request: each place of the answer has one, however often it is asked for."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random, self._drawn = random, list[float]()

    def at(self, place: int) -> float:
        while len(self._drawn) <= place:
            self._drawn.append(self._random.random())
        return self._drawn[place]


def adjusted(logits: Floats, sampling: Sampling, prompt: Sequence[int], answer: Mapping[int, int]) -> Floats:
    """Logits after penalties and biases; a copy where they change. `answer`: how often a token is in it.

    The penalties of OpenAI's API; repetition_penalty is of Keskar et al., 2019 (arXiv:1909.05858).
    """
    if not sampling.adjusts:
        return logits
    logits = logits.copy()
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.fromiter((*prompt, *answer), np.intp))
        values, penalty = logits[seen], np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.fromiter(answer.values(), np.float32, len(answer))
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[np.fromiter(answer, np.intp, len(answer))] -= penalties.astype(np.float32)
    for token, bias in sampling.bias:
        logits[token] += np.float32(bias)
    return logits


def choose(logits: Floats, sampling: Sampling, number: float) -> int:
    """One token from logits float32 [vocab]; `number`, from 0 to 1, decides which. Raises EngineError when
    the logits are not numbers."""
    best = int(logits.argmax())
    highest = logits[best]
    if not np.isfinite(highest):
        raise EngineError(f"the model's logits are not numbers (the largest is {highest})")
    if sampling.greedy:
        return best
    weights = logits.astype(np.float64)
    weights -= highest
    with np.errstate(over="ignore"):  # a tiny temperature: all but the best become impossible
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    return _drawn(_filtered(weights, sampling), number)


def _filtered(weights: Weights, sampling: Sampling) -> Weights:
    """Unnormalised probabilities of tokens, the largest of them 1: 0 for those that the filters leave out."""
    floor, size = sampling.min_p, len(weights)
    if 0 < sampling.top_k < size:
        floor = max(floor, np.partition(weights, size - sampling.top_k)[size - sampling.top_k])
    if floor > 0:
        weights[weights < floor] = 0
    if sampling.top_p == 1:
        return weights
    total = weights.sum()
    # All tokens below this together weigh less than what top_p leaves out: no need to sort them.
    tokens = np.flatnonzero(weights >= 0.5 * (1 - sampling.top_p) * total / size)
    # A stable sort, so that equal weights keep one order everywhere.
    tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
    kept = tokens[: int(np.searchsorted(np.cumsum(weights[tokens]), sampling.top_p * total)) + 1]
    found = np.zeros_like(weights)
    found[kept] = weights[kept]
    return found


def _drawn(weights: Weights, number: float) -> int:
    """The token in whose part of the sum of all weights `number`, from 0 to 1, falls. Blocks are summed
    first, because a running sum of all weights takes longer than everything else here."""
    starts = np.arange(0, len(weights), _BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts))
    place = min(number * ends[-1], np.nextafter(ends[-1], 0))
    block = int(np.searchsorted(ends, place, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    left = place - ends[block - 1] if block else place
    token = int(np.searchsorted(np.cumsum(inside), left, side="right"))
    if token == len(inside):  # the two ways to sum have rounded otherwise
        token = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + token


def logprobs(logits: Floats, token: int, count: int) -> Score:
    """The natural logarithm of the probability of `token`, and of the `count` most likely ones.

    Before temperature and filters, as OpenAI's API gives them.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    top = np.argpartition(-wide, min(count, len(wide) - 1))[:count]
    ordered = sorted(top.tolist(), key=lambda i: (-wide[i], i))
    return Logprob(token, float(wide[token])), tuple(Logprob(i, float(wide[i])) for i in ordered)
