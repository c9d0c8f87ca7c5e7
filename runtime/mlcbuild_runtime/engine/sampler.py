"""Which tokens one request gets: by its logits, its sampling parameters, its seed and its constraint."""

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
"""Returns the logits of one row; the caller may change them."""


class Trust:
    """Decides whether the model's own choice is tried before a mask is computed: the more rarely it fits the
    constraint, the more rarely it is tried."""

    LONGEST = 64

    def __init__(self) -> None:
        self._pause = self._next = 0

    def due(self, position: int) -> bool:
        """position: of a token in the answer."""
        return position >= self._next

    def settle(self, position: int, fits: bool) -> None:
        self._pause = self._pause // 2 if fits else min(self.LONGEST, 2 * self._pause + 1)
        self._next = position if fits else position + 1 + self._pause


class Sampler:
    """Draws the tokens of one answer. A `position` counts the tokens of the answer."""

    def __init__(self, request: Request, sample: Sample, matcher: Matcher | None) -> None:
        self._request, self._sampling, self._sample = request, request.sampling, sample
        self._matcher, self._trust = matcher, Trust()
        random = generator(request.sampling)
        self._numbers, self._mask_numbers = RandomNumbers(random), RandomNumbers(random.spawn(1)[0])
        self._counts: Counter[int] = Counter()
        self.mask: Mask | None = None
        """The logit mask of the first row of the coming step from which a token is drawn."""
        self.plain = matcher is None and not request.sampling.adjusts
        """The device alone draws the tokens."""

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    @property
    def finished(self) -> bool:
        """The constraint allows nothing but an end."""
        return self._matcher is not None and self._matcher.finished

    def params(self, position: int) -> SamplingRow:
        """Returns the parameters of a token that is drawn from the whole vocabulary."""
        return (*self._sampling.columns, self._numbers.at(position))

    def random_numbers(self, position: int, count: int) -> list[float]:
        """Returns the random numbers of `count` positions."""
        return self._numbers.some(position, count)

    def first_params(self, position: int) -> SamplingRow:
        """Returns the parameters of the next token and sets `mask`, so that only what the constraint allows
        is drawn. SKIP if `token` has to draw it."""
        number = self._first_number(position)
        return SKIP if number is None else (*self._sampling.columns, number)

    def _first_number(self, position: int) -> float | None:
        """Returns the random number of `first_params`."""
        matcher, self.mask = self._matcher, None
        if matcher is None or self._tries(self._trust, position):
            return self._numbers.at(position)
        if self._request.logprobs is not None:  # they cover the whole vocabulary
            return None
        try:
            self.mask = matcher.mask()
        except ServingError:  # reported by `token`
            return None
        return self._mask_numbers.at(position)

    def next_number(self, position: int) -> float | None:
        """Returns the random number of a guided step, and sets `mask`. None if `token` has to draw the token,
        or if the constraint leaves no alternative."""
        matcher = self._matcher
        if matcher is None:
            return self._numbers.at(position)
        return None if matcher.finished or matcher.forces else self._first_number(position)

    def _tries(self, trust: Trust, position: int) -> bool:
        """The model's own choice is tried before the constraint's mask is computed."""
        return trust.due(position) and not self._sampling.filters

    def token(self, logits: ReadLogits, drawn: int, position: int) -> int:
        """Returns the next token. drawn: the token that the device has drawn with `first_params`, or
        NO_TOKEN. Raises ServingError."""
        if self.mask is not None and drawn != NO_TOKEN:
            self.mask = None
            return checked(drawn)
        if self._matcher is not None or drawn < 0:
            return self._choose(logits, drawn, self._matcher, (position, []), self._trust)
        return drawn

    def propose(self, logits: Floats, position: int, draft: list[int]) -> int:
        """Returns the token after a draft that begins at `position`, from a draft model's logits. Raises
        ServingError."""
        matcher = None if self._matcher is None else self._matcher.after(draft)
        return self._choose(logits.copy, NO_TOKEN, matcher, (position, draft), copy(self._trust))

    def add(self, token: int) -> None:
        """Notes that a token is part of the answer. Raises ServingError."""
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.adjusts:
            self._counts[token] += 1

    def prepare(self, position: int) -> None:
        """Computes the mask of a position in advance, if one is needed: the caches hold the grammar now."""
        matcher = self._matcher
        if matcher is not None and not self._tries(self._trust, position):
            with suppress(ServingError):  # reported when the mask is needed
                matcher.mask()

    def forced(self, count: int) -> list[int]:
        """Returns up to `count` tokens to which the constraint leaves no alternative."""
        if (
            self._matcher is None or self._request.logprobs is not None
        ):  # only the model has log-probabilities
            return []
        return self._matcher.forced(count)

    def allowed(self, draft: list[int]) -> list[int]:
        """Returns the beginning of a draft that the constraint allows."""
        return draft if self._matcher is None else draft[: self._matcher.accepted(draft)]

    def _choose(
        self,
        logits: ReadLogits,
        drawn: int,
        matcher: Matcher | None,
        after: tuple[int, list[int]],
        trust: Trust,
    ) -> int:
        """Returns a token that depends on nothing but the logits, the seed and how well the answer has
        followed its constraint so far. after: the position at which a draft begins, and the draft."""
        counts, (position, draft) = self._counts, after
        if self._sampling.adjusts:
            counts = counts + Counter(draft) if draft else counts
            changed = adjusted(logits(), self._sampling, self._request.prompt, counts)
            logits = lambda: changed  # noqa: E731
        position += len(draft)
        if matcher is None:
            return self._free(logits, drawn, position)
        return self._fitting(logits, drawn, matcher, trust, position)

    def _free(self, logits: ReadLogits, drawn: int, position: int) -> int:
        """Returns the model's own choice."""
        if drawn != NO_TOKEN:
            return checked(drawn)
        return self._draw(logits(), self._numbers.at(position))

    def _draw(self, logits: Floats, number: float, mask: Mask | None = None) -> int:
        params = *self._sampling.columns, number
        (token,) = self._sample(logits[None], [params], [] if mask is None else [(0, mask)])
        return checked(token)

    def _fitting(self, logits: ReadLogits, drawn: int, matcher: Matcher, trust: Trust, position: int) -> int:
        """Returns a token that the constraint allows, with its probability among these: the model's own
        choice if it is one of them, else one that is drawn among them by another number (rejection
        sampling)."""
        if self._tries(trust, position) and matcher.free:
            token = self._free(logits, drawn, position)
            trust.settle(position, fits := matcher.tries(token))
            if fits:
                return token
        mask = matcher.mask()
        return self._draw(logits(), self._mask_numbers.at(position), mask)


def runner_up(logits: Floats, token: int) -> tuple[float, int]:
    """Returns how far a token's logit is ahead of the largest other one, and which token that is."""
    # Without a copy of all logits.
    sides = (0, logits[:token]), (token + 1, logits[token + 1 :])
    height, other = max((float(side.max()), first + int(side.argmax())) for first, side in sides if len(side))
    return float(logits[token]) - height, other
