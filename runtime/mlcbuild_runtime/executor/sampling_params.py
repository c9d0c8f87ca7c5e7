"""Implements a request's sampling parameters, random numbers, penalties and log-probabilities.

The tokens sampled for a request depend only on its logits and seed, not on the other requests in a batch.
"""

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
SamplingRow = tuple[float, float, float, float, float]
"""The sampling parameters of one row of logits: (1 / temperature (0: the most likely token), smallest kept
logit minus the largest one (-inf: no limit), top_p, top_k (0: no limit), random number in [0, 1)). A plain
tuple is created faster than a NamedTuple."""
SKIP: SamplingRow = abi.SKIP
Sample = Callable[[Floats, Sequence[SamplingRow], Masks], list[int]]
"""Function that samples one token from each row of logits: (logits, float32 [rows, vocabulary]; sampling
parameters of each row; masks of rows) -> tokens, -1 for a row in which a logit is NaN or the largest one is
infinite."""
_RANDOM_BLOCK = 32
"""Number of random numbers for sampling that are drawn in one NumPy call, which takes as long as drawing one.
"""
_PART = 64
"""Number of tokens in one block of the search for the most likely tokens: only blocks whose maximum is large
enough are searched."""
_MAX_INVERSE_TEMPERATURE = 1e30
"""Upper limit of 1 / temperature, to which larger values are set; with them only the most likely token would
be sampled. The inverse is the lower limit."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request. The filters of tokens apply in this order: top_k, min_p,
    top_p.
    """

    temperature: float = 1.0
    """Number by which logits are divided; with 0 the most likely token is always sampled."""
    top_p: float = 1.0
    """Sum of probabilities that the kept tokens must reach: the fewest most likely tokens are kept, and those
    as likely as the last of them; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens that are kept, with those as likely as the last of them; 0 keeps all."""
    min_p: float = 0.0
    """Fraction of the most likely token's probability that a kept token must have; 0 keeps all."""
    seed: int | None = None
    choice: int = 0
    """Index of the answer, from 0, if a request has several. Each answer gets different random numbers."""
    frequency_penalty: float = 0.0
    """Number subtracted from a token's logit once for each time that the token is in the answer."""
    presence_penalty: float = 0.0
    """Number subtracted from the logits of all tokens that are in the answer."""
    repetition_penalty: float = 1.0
    """Number that divides positive logits of tokens in prompt or answer, and multiplies negative ones; 1
    changes nothing."""
    bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token, number that is added to its logit)."""
    min_tokens: int = 0
    """Minimum number of tokens of the answer: before it, no token that ends the answer is sampled."""
    ends: tuple[int, ...] = ()
    """Tokens that end the answer; they are not sampled before it has `min_tokens` tokens."""

    @cached_property
    def adjusts(self) -> bool:
        has_no_penalty = self.frequency_penalty == self.presence_penalty == 0 and self.repetition_penalty == 1
        return not has_no_penalty or bool(self.bias) or self.min_tokens > 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @cached_property
    def columns(self) -> tuple[float, float, float, float]:
        """Returns the request's sampling parameters in the order of a row's, without its random number: (1 /
        temperature, smallest kept logit minus the largest one, top_p, top_k). The second one is -inf if
        `min_p` is 0. A request that always samples the most likely token has (0, -inf, 1, 0)."""
        greedy = abi.SamplingParams(
            inverse_temperature=0.0, logit_drop=-inf, top_p=1.0, top_k=0.0, random=0.0
        )
        if self.greedy:
            return greedy[:-1]
        scale = min(max(1 / self.temperature, 1 / _MAX_INVERSE_TEMPERATURE), _MAX_INVERSE_TEMPERATURE)
        drop = log(self.min_p) / scale if self.min_p else -inf
        return greedy._replace(
            inverse_temperature=scale, logit_drop=drop, top_p=self.top_p, top_k=float(self.top_k)
        )[:-1]

    @cached_property
    def filters(self) -> bool:
        """Returns True if top_k, min_p or top_p excludes tokens, so that a token's chance depends on the
        other tokens; False if the most likely token is always sampled."""
        return not self.greedy and (self.top_k > 0 or self.min_p > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Logprob:
    token: int
    logprob: float


Score = tuple[Logprob, tuple[Logprob, ...]]
"""The log-probabilities at one position of an answer or a prompt: (that of its token; those of the most
likely tokens, the likeliest first, among which the token may be)."""


def generator(sampling: Sampling) -> np.random.Generator:
    """Returns a new generator of the random numbers for one answer of a request. Equal seeds and indices of
    the answer give equal numbers on every machine; without a seed the numbers are different each time."""
    if sampling.seed is None:
        return np.random.default_rng()
    seed = sampling.seed & (1 << 64) - 1
    return np.random.default_rng([seed, sampling.choice] if sampling.choice else seed)


class RandomNumbers:
    """The random numbers, in [0, 1), of one answer: one for each of its positions, which stays the same
    however often it is read."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random, self._drawn = random, list[float]()

    def at(self, position: int) -> float:
        while len(self._drawn) <= position:
            self._drawn += self._random.random(_RANDOM_BLOCK).tolist()
        return self._drawn[position]

    def some(self, first: int, count: int) -> list[float]:
        """Returns the random numbers, in [0, 1), for the positions `first` to `first` + `count` - 1 of the
        answer."""
        self.at(first + count)
        return self._drawn[first : first + count]


def adjusted(logits: Floats, sampling: Sampling, prompt: Sequence[int], answer: Mapping[int, int]) -> Floats:
    """Returns a row of logits after penalties and biases, as a copy if they change; the logits of tokens that
    end the answer are minus infinity before it has `min_tokens` tokens. prompt: the prompt's tokens, which
    count only for the repetition penalty; answer: token -> number of times that it is in the answer.

    The penalties are those of OpenAI's API; repetition_penalty is from Keskar et al., 2019
    (arXiv:1909.05858)."""
    if not sampling.adjusts:
        return logits
    logits = logits.copy()
    if sampling.repetition_penalty != 1:
        earlier = np.unique(np.fromiter((*prompt, *answer), np.intp))
        values, penalty = logits[earlier], np.float32(sampling.repetition_penalty)
        logits[earlier] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.fromiter(answer.values(), np.float32, len(answer))
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[np.fromiter(answer, np.intp, len(answer))] -= penalties.astype(np.float32)
    for token, bias in sampling.bias:
        logits[token] += np.float32(bias)
    if sum(answer.values()) < sampling.min_tokens:
        logits[list(sampling.ends)] = -inf
    return logits


def checked(token: int) -> int:
    """Returns a sampled token unchanged. Raises EngineError if it is negative, which marks a row in which a
    logit is NaN or the largest one is infinite."""
    if token < 0:
        raise EngineError("the model's logits are not numbers")
    return token


def logprobs(logits: Floats, token: int, count: int) -> Score:
    """Returns (log-probability of `token`, those of the `count` most likely tokens, among which it may be,
    the likeliest first) for a row of logits. They are natural logarithms, before temperature and filters, as
    in OpenAI's API."""
    most = logits.max()
    log_sum = float(most) + log(np.exp(logits - most).sum(dtype=np.float64))
    chosen, *others = (Logprob(i, float(logits[i]) - log_sum) for i in (token, *_likely(logits, count)))
    return chosen, tuple(others)


def _likely(logits: Floats, count: int) -> list[int]:
    """Returns the `count` tokens with the largest logits, the largest first; among equal logits, lower tokens
    come first."""
    if count == 0:
        return []
    # At least `count` blocks have a logit of `bound` or more, so few other logits are sorted.
    parts = logits[: len(logits) // _PART * _PART].reshape(-1, _PART).max(axis=1)
    bound = np.partition(parts, -count)[-count] if len(parts) >= count else -inf
    candidates = np.flatnonzero(logits >= bound)
    ordered: list[int] = candidates[np.argsort(-logits[candidates], kind="stable")][:count].tolist()
    return ordered


class PromptScores:
    """Computes the log-probabilities of a prompt's tokens, from the second token on, as the logits of the
    prompt arrive."""

    def __init__(self, prompt: Sequence[int], alternatives: int) -> None:
        self._prompt, self._alternatives = prompt, alternatives
        self._count, self._pending = 0, list[Score]()

    def add(self, rows: Floats, position: int) -> None:
        """Computes and stores log-probabilities. rows: logits, float32 [n, vocabulary], of n consecutive
        tokens of the prompt; position: index of the token that follows the first of these. Tokens that have a
        log-probability already, as happens after a preemption, are skipped; so are those after a gap."""
        for at, row in enumerate(rows, position):
            if at == self._count + 1 < len(self._prompt):
                self._pending.append(logprobs(row, self._prompt[at], self._alternatives))
                self._count += 1

    def take(self) -> tuple[Score, ...]:
        """Returns the log-probabilities of the prompt's tokens that were computed since the last call, each
        only once: one `Score` for each token, in order, () if there is none."""
        pending, self._pending = tuple(self._pending), []
        return pending
