"""How tokens are chosen. A request's choices depend on its own logits and seed, whatever shares its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.errors import EngineError
from numpy.typing import NDArray

from mlcbuild_runtime.executor.batch import Masks

Floats = NDArray[np.float32]
Way = tuple[float, float, float, float, float]
"""The values of an abi.SamplingParams, which says what they mean; a plain tuple is made faster."""
SKIPPED: Way = abi.SKIP
Choose = Callable[[Floats, Sequence[Way], Masks], list[int]]
"""Tokens from rows of logits float32 [q, size], one way for each: a function of the library. A row's token
depends on its own logits, way and mask alone. Where there is a mask for a row, the logits of tokens that are
not in it become minus infinity, in place."""
DRAWN = 32
"""Random numbers that are drawn at once: to draw one takes as long."""
_PART = 64
"""Tokens of which only the most likely one is looked at to find out where the most likely ones of all are."""
_STEEPEST = 1e30
"""1 / temperature, at most: only those as likely as the most likely token have a chance then."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. The filters apply in this order: top_k, min_p, top_p."""

    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this, and those as likely as the
    last of them."""
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

    @cached_property
    def adjusts(self) -> bool:
        plain = self.frequency_penalty == self.presence_penalty == 0 and self.repetition_penalty == 1
        return not plain or bool(self.bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @cached_property
    def way(self) -> tuple[float, float, float, float]:
        """A Way but for its random number, which is the last column."""
        plain = abi.SamplingParams(inverse_temperature=0.0, logit_drop=-inf, top_p=1.0, top_k=0.0, random=0.0)
        if self.greedy:
            return plain[:-1]
        scale = min(max(1 / self.temperature, 1 / _STEEPEST), _STEEPEST)
        drop = log(self.min_p) / scale if self.min_p else -inf
        return plain._replace(
            inverse_temperature=scale, logit_drop=drop, top_p=self.top_p, top_k=float(self.top_k)
        )[:-1]

    @cached_property
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
            self._drawn += self._random.random(DRAWN).tolist()
        return self._drawn[place]

    def some(self, first: int, count: int) -> list[float]:
        """Those of `count` places."""
        self.at(first + count)
        return self._drawn[first : first + count]


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


def checked(token: int) -> int:
    """A token that was chosen. Raises EngineError when the logits are not numbers."""
    if token < 0:
        raise EngineError("the model's logits are not numbers")
    return token


def logprobs(logits: Floats, token: int, count: int) -> Score:
    """The natural logarithm of the probability of `token`, and of the `count` most likely ones.

    Before temperature and filters, as OpenAI's API gives them.
    """
    most = logits.max()
    whole = float(most) + log(np.exp(logits - most).sum(dtype=np.float64))
    found = [Logprob(i, float(logits[i]) - whole) for i in (token, *_likely(logits, count))]
    return found[0], tuple(found[1:])


def _likely(logits: Floats, count: int) -> list[int]:
    """The `count` tokens of the largest logits; of like ones, those with lower numbers."""
    if count == 0:
        return []
    # As many parts of the row have something that is at least as large as the bound: little else is sorted.
    parts = logits[: len(logits) // _PART * _PART].reshape(-1, _PART).max(axis=1)
    bound = np.partition(parts, -count)[-count] if len(parts) >= count else -inf
    found = np.flatnonzero(logits >= bound)
    ordered: list[int] = found[np.argsort(-logits[found], kind="stable")][:count].tolist()
    return ordered


class Scores:
    """Log-probabilities of a prompt's tokens from the second on, each once, as logits come."""

    def __init__(self, prompt: Sequence[int], alternatives: int) -> None:
        self._prompt, self._alternatives = prompt, alternatives
        self._made, self._untold = 0, list[Score]()

    def add(self, rows: Floats, place: int) -> None:
        """Takes logits [n, vocab] of the tokens from `place` on; also those of a prompt that is computed
        again."""
        for at, row in enumerate(rows, place):
            if at == self._made + 1 < len(self._prompt):
                self._untold.append(logprobs(row, self._prompt[at], self._alternatives))
                self._made += 1

    def told(self) -> tuple[Score, ...]:
        """Those since the last call."""
        found, self._untold = tuple(self._untold), []
        return found
