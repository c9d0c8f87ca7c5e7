"""Logits to a token. A request's choices depend on its own logits and seed, whatever shares its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime.errors import EngineError

Floats = NDArray[np.float32]


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
    """The random numbers of one request: each place of the answer has one, however often it is asked for."""

    def __init__(self, sampling: Sampling) -> None:
        self._random, self._drawn = generator(sampling), list[float]()

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
    if sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature: all but the best become impossible
        scaled = (logits.astype(np.float64) - np.float64(highest)) / sampling.temperature
    tokens, weights = _candidates(np.exp(scaled), sampling)
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def _candidates(
    weights: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The tokens that the filters keep, most likely first, with their unnormalised probabilities."""
    floor, size = sampling.min_p, len(weights)  # the most likely token's weight is 1
    if 0 < sampling.top_k < size:
        floor = max(floor, np.partition(weights, size - sampling.top_k)[size - sampling.top_k])
    tokens = np.flatnonzero(weights >= floor)
    total = weights[tokens].sum()
    if sampling.top_p < 1:
        # All tokens below this together weigh less than what top_p leaves out: no need to sort them.
        tokens = tokens[weights[tokens] >= 0.5 * (1 - sampling.top_p) * total / len(tokens)]
    # A stable sort, so that equal weights keep one order everywhere.
    tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
    kept = weights[tokens]
    if sampling.top_p < 1:
        count = int(np.searchsorted(np.cumsum(kept), sampling.top_p * total)) + 1
        tokens, kept = tokens[:count], kept[:count]
    return tokens, kept


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
