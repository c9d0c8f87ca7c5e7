"""Samples the tokens of one request from its logits, sampling parameters, seed and constraint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy

from mlcbuild_format.abi import NO_TOKEN
from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.executor.batch import Mask
from mlcbuild_runtime.executor.sampling_params import (
    SKIP,
    Floats,
    RandomNumbers,
    Sample,
    SamplingRow,
    adjusted,
    checked,
    generator,
)

ReadLogits = Callable[[], Floats]
"""Function without arguments that returns the row of logits, float32 [vocabulary], from which a token is to
be sampled; the caller may modify the array."""


class Backoff:
    """Decides, for an answer with a constraint, whether the next token is sampled first and then checked
    against the grammar (cheap), or sampled under a logit mask. Exponential back-off: after each violation the
    next 1, 3, 7, ... or at most 64 tokens are sampled under a mask, and each token sampled without a mask
    that fits halves this number."""

    LONGEST = 64

    def __init__(self) -> None:
        self._pause = self._next = 0

    def due(self, position: int) -> bool:
        """Returns True if the token at `position`, its index in the answer, should be sampled without a mask
        and checked against the grammar afterwards, False if a mask should be computed first.
        """
        return position >= self._next

    def settle(self, position: int, fits: bool) -> None:
        self._pause = self._pause // 2 if fits else min(self.LONGEST, 2 * self._pause + 1)
        self._next = position if fits else position + 1 + self._pause


class Sampler:
    """Samples the tokens of one answer. A `position` is the index of a token in the answer."""

    def __init__(self, request: Request, sample: Sample, matcher: Matcher | None) -> None:
        self._request, self._sampling, self._sample = request, request.sampling, sample
        self._matcher, self._backoff = matcher, Backoff()
        random = generator(request.sampling)
        self._numbers, self._mask_numbers = RandomNumbers(random), RandomNumbers(random.spawn(1)[0])
        self._counts: Counter[int] = Counter()
        self.mask: Mask | None = None
        """Logit mask, int32 words with one bit per token, 1 if it is allowed, for the next token of this
        answer that the device samples in the coming step; None: it samples from all tokens, and a constraint
        is checked afterwards."""
        self.plain = matcher is None and not request.sampling.adjusts
        """True if the device alone can sample the answer's tokens: there is no constraint, no penalty, no
        bias and no minimum length."""

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    @property
    def finished(self) -> bool:
        """Returns True if the constraint allows only the end of the answer; False without a constraint."""
        return self._matcher is not None and self._matcher.finished

    def params(self, position: int) -> SamplingRow:
        """Returns the sampling parameters of the token at index `position` of the answer, for sampling from
        the whole vocabulary."""
        return (*self._sampling.columns, self._numbers.at(position))

    def random_numbers(self, position: int, count: int) -> list[float]:
        """Returns the random numbers, in [0, 1), for the tokens with the indices `position` to `position` +
        `count` - 1 of the answer."""
        return self._numbers.some(position, count)

    def first_params(self, position: int) -> SamplingRow:
        """Returns the sampling parameters with which the device samples the token at index `position` of the
        answer, and sets the sampler's attribute `mask` to the logit mask for it, or to None if it samples
        without one. The parameters are SKIP (no token) if the host must sample it."""
        number = self._first_number(position)
        return SKIP if number is None else (*self._sampling.columns, number)

    def _first_number(self, position: int) -> float | None:
        """Returns the random number, in [0, 1), with which the device samples the token at index `position`
        of the answer, and sets the sampler's attribute `mask` to the logit mask for it, or to None if it
        samples without one. Returns None if the host must sample the token: it needs a mask, and
        log-probabilities are requested or the constraint is too costly to follow."""
        matcher, self.mask = self._matcher, None
        if matcher is None or self._tries(self._backoff, position):
            return self._numbers.at(position)
        if self._request.logprobs is not None:  # Log-probabilities cover the whole vocabulary.
            return None
        try:
            self.mask = matcher.mask()
        except ServingError:  # reported by `token`
            return None
        return self._mask_numbers.at(position)

    def next_number(self, position: int) -> float | None:
        """Returns the random number, in [0, 1), with which the device samples the token at index `position`
        of the answer, in a burst of steps whose earlier tokens are not delivered yet. Stores the logit mask
        for it in the attribute `mask`, None if it is sampled without one. Returns None if the burst must end
        before this token: the host must sample it, or the constraint allows only the end, or only one
        continuation for the next two bytes or more, whose tokens are appended without sampling."""
        matcher = self._matcher
        if matcher is None:
            return self._numbers.at(position)
        return None if matcher.finished or matcher.forces else self._first_number(position)

    def _tries(self, backoff: Backoff, position: int) -> bool:
        """Returns True if the token at index `position` of the answer should be sampled without a mask first,
        and checked against the grammar afterwards: `backoff` requires no mask after earlier violations, and
        the request's top_k, min_p and top_p exclude no tokens."""
        return backoff.due(position) and not self._sampling.filters

    def token(self, logits: ReadLogits, drawn: int, position: int) -> int:
        """Returns the token at index `position` of the answer; if the request has a constraint, the
        constraint allows the token. The caller must then pass it to the method `add`. drawn: the token that
        the device sampled, or NO_TOKEN (-2) for none; logits: function that returns the row of logits, for
        sampling on the host. Raises ServingError for invalid logits (a NaN or an infinite maximum), or a
        constraint that is too costly to follow."""
        if self.mask is not None and drawn != NO_TOKEN:
            self.mask = None
            return checked(drawn)
        if self._matcher is not None or drawn < 0:
            return self._choose(logits, drawn, self._matcher, (position, []), self._backoff)
        return drawn

    def propose(self, logits: Floats, position: int, draft: list[int]) -> int:
        """Returns the token that follows a draft, sampled from a draft model's logits; a constraint allows
        it. The sampler does not change. logits: one row, float32 [vocabulary], for the position after the
        draft; position: index in the answer at which the draft begins; draft: its tokens so far. Raises
        ServingError for invalid logits (a NaN or an infinite maximum), or a constraint that is too costly to
        follow."""
        matcher = None if self._matcher is None else self._matcher.after(draft)
        return self._choose(logits.copy, NO_TOKEN, matcher, (position, draft), copy(self._backoff))

    def add(self, token: int) -> None:
        """Records a new token of the answer for the constraint and the penalties. Raises ServingError for a
        constraint that is too costly to follow."""
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.adjusts:
            self._counts[token] += 1

    def prepare(self, position: int) -> None:
        """Computes and caches the logit mask of the token at index `position` of the answer in advance, if it
        will be needed, while the grammar is in the CPU's caches. An error is raised only where the mask is
        needed."""
        matcher = self._matcher
        if matcher is not None and not self._tries(self._backoff, position):
            with suppress(ServingError):  # reported when the mask is needed
                matcher.mask()

    def forced(self, count: int) -> list[int]:
        """Returns up to `count` tokens that must follow in the answer, because the constraint allows no
        others; [] without a constraint, if it forces fewer than two bytes, or if the request needs
        log-probabilities, which the model computes."""
        if (
            self._matcher is None or self._request.logprobs is not None
        ):  # Only the model has log-probabilities.
            return []
        return self._matcher.forced(count)

    def allowed(self, draft: list[int]) -> list[int]:
        """Returns the longest prefix of a draft's tokens that the grammar of the request's constraint allows
        next; the whole draft without a constraint."""
        return draft if self._matcher is None else draft[: self._matcher.accepted(draft)]

    def _choose(
        self,
        logits: ReadLogits,
        drawn: int,
        matcher: Matcher | None,
        after: tuple[int, list[int]],
        backoff: Backoff,
    ) -> int:
        """Returns the token that is sampled after a draft, which may be empty; the constraint allows it. It
        depends only on the logits, the sampling parameters, the seed, its index, the tokens before it (for
        penalties), and how often sampled tokens of the answer have violated the constraint before.

        logits: function that returns the row of logits after the draft; drawn: the token that the device
        sampled from it, or NO_TOKEN (-2) if it sampled none; matcher: follows the constraint and has taken
        the draft's tokens already, None without one; after: (index in the answer at which the draft begins,
        the draft's tokens); backoff: decides whether a token is sampled without a logit mask first, and is
        told the outcome. Raises ServingError for invalid logits (a NaN or an infinite maximum), or a
        constraint that is too costly to follow.
        """
        counts, (position, draft) = self._counts, after
        if self._sampling.adjusts:
            counts = counts + Counter(draft) if draft else counts
            changed = adjusted(logits(), self._sampling, self._request.prompt, counts)
            logits = lambda: changed  # noqa: E731
        position += len(draft)
        if matcher is None:
            return self._free(logits, drawn, position)
        return self._fitting(logits, drawn, matcher, backoff, position)

    def _free(self, logits: ReadLogits, drawn: int, position: int) -> int:
        """Returns the token at index `position` of the answer without regard to the constraint: `drawn`, if
        the device sampled one, else a token that is sampled from the row of logits here. Raises EngineError
        for invalid logits (a NaN or an infinite maximum)."""
        if drawn != NO_TOKEN:
            return checked(drawn)
        return self._draw(logits(), self._numbers.at(position))

    def _draw(self, logits: Floats, number: float, mask: Mask | None = None) -> int:
        params = *self._sampling.columns, number
        (token,) = self._sample(logits[None], [params], [] if mask is None else [(0, mask)])
        return checked(token)

    def _fitting(
        self, logits: ReadLogits, drawn: int, matcher: Matcher, backoff: Backoff, position: int
    ) -> int:
        """Returns an allowed token: the unconstrained sample if one is tried first and the grammar allows it,
        else one sampled under the logit mask with another random number (rejection sampling). Raises
        ServingError for invalid logits (a NaN or an infinite maximum), or a constraint that is too costly to
        follow."""
        if self._tries(backoff, position) and matcher.free:
            token = self._free(logits, drawn, position)
            backoff.settle(position, fits := matcher.tries(token))
            if fits:
                return token
        mask = matcher.mask()
        return self._draw(logits(), self._mask_numbers.at(position), mask)


def runner_up(logits: Floats, token: int) -> tuple[float, int]:
    """Returns (logit of `token` minus the largest logit of another token, that other token)."""
    # Slices avoid a copy of all logits.
    sides = (0, logits[:token]), (token + 1, logits[token + 1 :])
    height, other = max((float(side.max()), first + int(side.argmax())) for first, side in sides if len(side))
    return float(logits[token]) - height, other
