"""Which tokens one request gets: by its logits, its sampling, its seed and its constraint."""

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
    SKIPPED,
    Choose,
    Floats,
    Numbers,
    Way,
    adjusted,
    checked,
    generator,
)

Row = tuple[Callable[[], Floats], int]
"""Logits, for those who ask for them, who may change them; and the token that was chosen from them."""


class Trust:
    """Whether what the model wants is tried before a mask is computed: the rarer it fits, the rarer."""

    LONGEST = 64

    def __init__(self) -> None:
        self._pause = self._next = 0

    def due(self, place: int) -> bool:
        """`place`: of a token in the answer."""
        return place >= self._next

    def settle(self, place: int, fits: bool) -> None:
        self._pause = self._pause // 2 if fits else min(self.LONGEST, 2 * self._pause + 1)
        self._next = place if fits else place + 1 + self._pause


class Chooser:
    """Of one answer. A `place` is that of a token in the answer."""

    def __init__(self, request: Request, choose: Choose, matcher: Matcher | None) -> None:
        self._request, self._sampling, self._choose = request, request.sampling, choose
        self._matcher, self._trust = matcher, Trust()
        random = generator(request.sampling)
        self._numbers, self._others = Numbers(random), Numbers(random.spawn(1)[0])
        self._counts: Counter[int] = Counter()
        self.mask: Mask | None = None
        """Of tokens that may be chosen from the first row of the coming step that chooses any."""

    @property
    def plain(self) -> bool:
        """By the library alone."""
        return self._matcher is None and not self._sampling.adjusts

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    @property
    def finished(self) -> bool:
        """The constraint lets nothing but an end follow."""
        return self._matcher is not None and self._matcher.finished

    def way(self, place: int) -> Way:
        """Of tokens that are chosen from all."""
        return (*self._sampling.way, self._numbers.at(place))

    def numbers(self, place: int, count: int) -> list[float]:
        """The random numbers of so many ways from `place` on."""
        return self._numbers.some(place, count)

    def first_way(self, place: int) -> Way:
        """Of the next token, from whose row only what the constraint allows is chosen, by `mask`. SKIPPED
        where that is left to `token`."""
        number = self.first_number(place)
        return SKIPPED if number is None else (*self._sampling.way, number)

    def first_number(self, place: int) -> float | None:
        """The random number of `first_way`."""
        matcher, self.mask = self._matcher, None
        if matcher is None or self._tries(self._trust, place):
            return self._numbers.at(place)
        if self._request.logprobs is not None:  # these are of all tokens
            return None
        try:
            self.mask = matcher.mask()
        except ServingError:  # told by `token`
            return None
        return self._others.at(place)

    def further(self, place: int) -> float | None:
        """As `first_number`, for a step that follows another at once. None, too, where the constraint leaves
        no choice."""
        matcher = self._matcher
        if matcher is None:
            return self._numbers.at(place)
        return None if matcher.finished or matcher.forces else self.first_number(place)

    def _tries(self, trust: Trust, place: int) -> bool:
        """What the model wants is tried before the constraint's mask is computed."""
        return trust.due(place) and not self._sampling.filters

    def token(self, row: Row, place: int) -> int:
        """The next token, from a row of logits and what was chosen from it by `first_way`. Raises
        ServingError."""
        _, token = row
        if self.mask is not None and token != NO_TOKEN:
            self.mask = None
            return checked(token)
        if self._matcher is not None or token < 0:
            return self._choice(row, self._matcher, (place, []), self._trust)
        return token

    def guess(self, logits: Floats, place: int, draft: list[int]) -> int:
        """A token after a draft that begins at `place`, from a draft model's logits. Raises ServingError."""
        matcher = None if self._matcher is None else self._matcher.after(draft)
        return self._choice((logits.copy, NO_TOKEN), matcher, (place, draft), copy(self._trust))

    def add(self, token: int) -> None:
        """The token is part of the answer. Raises ServingError."""
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.adjusts:
            self._counts[token] += 1

    def prepare(self, place: int) -> None:
        """The mask for a token's place, where one will be needed: the caches have the grammar now."""
        matcher = self._matcher
        if matcher is not None and not self._tries(self._trust, place):
            with suppress(ServingError):  # told when it is needed
                matcher.mask()

    def forced(self, count: int) -> list[int]:
        """Up to `count` tokens that the constraint leaves no choice about."""
        if self._matcher is None or self._request.logprobs is not None:  # only the model knows these
            return []
        return self._matcher.forced(count)

    def allowed(self, draft: list[int]) -> list[int]:
        """As much of a draft as the constraint allows."""
        return draft if self._matcher is None else draft[: self._matcher.accepted(draft)]

    def _choice(self, row: Row, matcher: Matcher | None, after: tuple[int, list[int]], trust: Trust) -> int:
        """It depends on nothing else but the logits, the seed and how well the answer has followed its
        constraint so far. after: where a draft begins, and the draft."""
        counts, (place, draft) = self._counts, after
        if self._sampling.adjusts:
            counts = counts + Counter(draft) if draft else counts
            logits = adjusted(row[0](), self._sampling, self._request.prompt, counts)
            row = (lambda: logits), row[1]
        place += len(draft)
        return self._wanted(row, place) if matcher is None else self._fitting(row, matcher, trust, place)

    def _wanted(self, row: Row, place: int) -> int:
        """What the model wants."""
        logits, chosen = row
        return checked(chosen) if chosen != NO_TOKEN else self._drawn(logits(), self._numbers.at(place))

    def _drawn(self, logits: Floats, number: float, mask: Mask | None = None) -> int:
        way = *self._sampling.way, number
        (chosen,) = self._choose(logits[None], [way], [] if mask is None else [(0, mask)])
        return checked(chosen)

    def _fitting(self, row: Row, matcher: Matcher, trust: Trust, place: int) -> int:
        """A token that the constraint allows, as likely as it is among these: what the model wants where that
        is one of them, and else one that is chosen among them by another number (rejection sampling)."""
        if self._tries(trust, place) and matcher.free:
            token = self._wanted(row, place)
            trust.settle(place, fits := matcher.tries(token))
            if fits:
                return token
        mask = matcher.mask()
        return self._drawn(row[0](), self._others.at(place), mask)


def second(logits: Floats, token: int) -> tuple[float, int]:
    """How far a token's logit is ahead of the largest other one, and whose that is."""
    # Without a copy of all logits.
    sides = (0, logits[:token]), (token + 1, logits[token + 1 :])
    height, other = max((float(side.max()), first + int(side.argmax())) for first, side in sides if len(side))
    return float(logits[token]) - height, other
