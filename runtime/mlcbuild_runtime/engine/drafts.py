"""What speculative decoding proposes without a model, and whether drafts pay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcbuild_runtime.engine.draft_tree import Branch

TOKENS = 8
"""Tokens that are drafted at most, by default."""
SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, the longest first."""
BRANCH = 2
"""Tokens of a branch: those after them are seldom right."""


@dataclass(frozen=True)
class Speculate:
    """How to draft."""

    draft: Path | None = None
    """A bundle of the same vocabulary; None: look up what a sequence has said before."""
    tokens: int = TOKENS
    """To draft at most."""
    branches: bool = True
    """Other ways on beside a draft, too, where they pay."""

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
        self._others: dict[tuple[int, ...], int] = {}
        """The latest place where something else followed it."""
        self._seen = 0

    def _learn(self, tokens: Sequence[int]) -> None:
        places, others = self._places, self._others
        for end in range(self._seen, len(tokens)):
            for size in SIZES:
                if end >= size:
                    ngram = tuple(tokens[end - size : end])
                    known = places.get(ngram)
                    if known is not None and tokens[known] != tokens[end]:
                        others[ngram] = known
                    places[ngram] = end
        self._seen = len(tokens)

    def others(self, tokens: Sequence[int], draft: Sequence[int], count: int) -> list[Branch]:
        """Up to `count` tokens on branches of a draft after `tokens`: what else followed, where the draft's
        last few tokens were followed by something else, too."""
        self._learn(tokens)
        found = list[Branch]()
        for start, token in enumerate(draft):
            text = (*tokens[-SIZES[0] :], *draft[:start])
            ngram = next((text[-size:] for size in SIZES if text[-size:] in self._places), None)
            for place in () if ngram is None else (self._places[ngram], self._others.get(ngram)):
                if place is not None and tokens[place] != token and count > 0:
                    found.append(Branch(start, list(tokens[place : place + min(count, BRANCH)])))
                    count -= len(found[-1].tokens)
        return found

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after `tokens`, which only ever grow from call to call."""
        self._learn(tokens)
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

    _FIRST, _MOST, _GIFT, _LONGEST = 1.5, 6.0, 0.02, 16

    def __init__(self) -> None:
        self.balance, self.length = self._FIRST, 4

    def affordable(self, most: int) -> int:
        return min(self.length, most) if self.balance > 0 else 0

    def rest(self) -> None:
        """A token was made without a draft."""
        self.balance = min(self._MOST, self.balance + self._GIFT)

    def settle(self, drafted: int, accepted: int, price: float, gained: int = 0) -> None:
        """`price`: what a drafted token has cost, in tokens. `gained`: tokens that were right on a branch
        after those that were accepted."""
        self.balance = min(self._MOST, self.balance + accepted - drafted * price)
        self.length = min(2 * self.length, self._LONGEST) if accepted == drafted else accepted + gained + 1


class Odds:
    """Whether branches beside the draft of a sequence pay: from how often their tokens were right. A sequence
    begins with a guess, to which it slowly comes back while it has none."""

    _FIRST, _WEIGHT, _PACE, _BACK = 0.15, 1 / 24, 1 / 8, 1 / 500

    def __init__(self) -> None:
        self.rate = self._FIRST
        """Tokens that were right, of each token on a branch."""
        self.pace = 1.0
        """Tokens made in a step."""

    def worthwhile(self, pace: float, shares: Sequence[float]) -> int:
        """Tokens to draft on branches. `pace`: tokens that the step makes for all sequences; `shares`: of its
        time, what 1, 2 ... tokens add."""
        gains = [(self.rate * count - pace * share, count) for count, share in enumerate(shares, 1)]
        gain, count = max(gains, default=(0.0, 0))
        return count if gain > 0 else 0

    def settle(self, branched: int, gained: int, made: int) -> None:
        """After a step that made `made` tokens, `gained` of them from `branched` ones on branches."""
        self.pace += (made - self.pace) * self._PACE
        self.rate += (gained - self.rate * branched) * self._WEIGHT
        if not branched:
            self.rate += (self._FIRST - self.rate) * self._BACK


class Prices:
    """What drafts cost, from the times of steps. The shortest count: the others had to wait for something."""

    _GUESS = 0.2
    """Of a step, for each drafted token, before anything is known."""
    _FORGET = 1.01
    """Steps become slower as texts become longer."""

    _TRIES = 2
    """Steps before the time of such steps is known."""

    def __init__(self) -> None:
        self._best: dict[tuple[int, int, int], float] = {}
        self._tried: Counter[tuple[int, int, int]] = Counter()

    def observe(self, batch: int, drafted: int, seconds: float, branched: int = 0) -> None:
        """A step of `batch` sequences with `drafted` more tokens, and `branched` on branches; drafting
        included."""
        kind = batch, drafted, branched
        self._best[kind] = min(seconds, self._best.get(kind, math.inf) * self._FORGET)
        self._tried[kind] += 1

    def _known(self, batch: int, drafted: int, branched: int = 0) -> float | None:
        kind = batch, drafted, branched
        return self._best[kind] if self._tried[kind] >= self._TRIES else None

    def price(self, batch: int, drafted: int) -> float:
        """Tokens that were not made in the time that one of the drafted tokens took."""
        plain, whole = self._best.get((batch, 0, 0)), self._best.get((batch, drafted, 0))
        extra = drafted * self._GUESS if plain is None or whole is None else max(0.0, whole / plain - 1)
        return extra * batch / drafted

    def best(self, batch: int, most: int) -> int:
        """How many tokens to draft, at most `most`: so that a step makes most tokens in its time if all are
        right. Kernels take rows some at a time, and one more row than that costs as much as several. What
        is not known is taken for as short as less."""
        longest, found = 0.0, (0.0, most)
        for drafted in range(most + 1):
            longest = max(longest, self._known(batch, drafted) or 0.0)
            if longest and drafted:
                found = max(found, ((batch + drafted) / longest, drafted))
        return found[1]

    def share(self, batch: int, drafted: int, branched: int) -> float:
        """Of the time of a step, what tokens on branches add: at least as much as those tokens would in a
        draft. Infinite while that is not known."""
        plain, longer = self._known(batch, drafted), self._known(batch, drafted + branched)
        if plain is None or longer is None:
            return math.inf
        return max(0.0, (self._known(batch, drafted, branched) or longer) / plain - 1)
