"""What speculative decoding proposes without a model, and whether drafts pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENS = 8
"""Tokens that are drafted at most, by default."""
SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, the longest first."""


@dataclass(frozen=True)
class Speculate:
    """How to draft."""

    draft: Path | None = None
    """A bundle of the same vocabulary; None: look up what a sequence has said before."""
    tokens: int = TOKENS
    """To draft at most."""

    @classmethod
    def of(cls, how: str | Path, tokens: int | None = None) -> Speculate:
        """From `lookup` or the directory of a bundle."""
        return cls(None if how == "lookup" else Path(how), tokens or TOKENS)


class Lookup:
    """Prompt lookup (Saxena, 2023): what followed the last few tokens when they came before.

    Only n-grams of at least two tokens count; of several places the latest.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        """N-gram -> where what followed it begins."""
        self._seen = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after `tokens`, which only ever grow from call to call."""
        for end in range(self._seen, len(tokens)):
            for size in SIZES:
                if end >= size:
                    self._places[tuple(tokens[end - size : end])] = end
        self._seen = len(tokens)
        for size in SIZES:
            place = self._places.get(tuple(tokens[-size:]))
            if place is not None:
                found = list(tokens[place : place + count])
                while len(found) < count:  # it runs into the end: what repeats itself goes on
                    found.append(found[place - len(tokens)])
                return found
        return []


class Prediction:
    """What somebody expects an answer to be, such as a text with a few changes."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._seen, self._place = list(tokens), 0, 0
        self._places: dict[tuple[int, ...], int] = {}
        """N-gram -> where what first followed it begins."""
        for end in range(len(self._tokens), 0, -1):
            for size in SIZES:
                if end >= size:
                    self._places[tuple(self._tokens[end - size : end])] = end

    def propose(self, answer: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after `answer`, which only ever grows from call to call."""
        more = list(answer[self._seen :])
        self._seen = len(answer)
        place = self._place + len(more)
        if place <= len(self._tokens) and self._tokens[self._place : place] == more:
            self._place = place
        else:
            known = (self._places.get(tuple(answer[-size:])) for size in SIZES if len(answer) >= size)
            self._place = next((place for place in known if place is not None), len(self._tokens))
        return self._tokens[self._place : self._place + count]


class Credit:
    """How many tokens a sequence may draft: as long as its drafts have paid for themselves.

    The balance is in tokens: what was accepted minus what checking it has cost. A sequence begins with a
    little, gets a little for each token without a draft, and drafts while it has any: so drafts that are
    always wrong cost a token or two and then a fiftieth of the time.
    """

    _FIRST, _MOST, _GIFT = 1.5, 6.0, 0.02

    def __init__(self) -> None:
        self.balance, self.length = self._FIRST, 4

    def wanted(self, most: int) -> int:
        return min(self.length, most) if self.balance > 0 else 0

    def rest(self) -> None:
        """A token was made without a draft."""
        self.balance = min(self._MOST, self.balance + self._GIFT)

    def settle(self, drafted: int, accepted: int, price: float) -> None:
        """`price`: what a drafted token has cost, in tokens."""
        self.balance = min(self._MOST, self.balance + accepted - drafted * price)
        self.length = max(self.length, 2 * drafted) if accepted == drafted else accepted + 1


class Prices:
    """What drafts cost, from the times of steps. The shortest count: the others had to wait for something."""

    _GUESS = 0.2
    """Of a step, for each drafted token, before anything is known."""
    _FORGET = 1.01
    """Steps become slower as texts become longer."""

    def __init__(self) -> None:
        self._best: dict[tuple[int, int], float] = {}

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """A step of `batch` sequences with `drafted` more tokens, drafting included."""
        known = self._best.get((batch, drafted), math.inf)
        self._best[batch, drafted] = min(seconds, known * self._FORGET)

    def price(self, batch: int, drafted: int) -> float:
        """Tokens that were not made in the time that one of the drafted tokens took."""
        plain, whole = self._best.get((batch, 0)), self._best.get((batch, drafted))
        extra = drafted * self._GUESS if plain is None or whole is None else max(0.0, whole / plain - 1)
        return extra * batch / drafted
