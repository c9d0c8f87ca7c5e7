"""Drafts tokens without a model (prompt lookup, clients' predictions), and estimates whether drafts
pay off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcbuild_runtime.engine.draft_tree import Branch

TOKENS = 8
"""Default maximum number of tokens in a draft. `ci/bench/speculation` measures what drafts gain and cost."""
SIZES = (4, 3, 2)
"""Lengths, in tokens, of the n-grams that prompt lookup searches for, longest first. These give 2.18,
2.29 and 2.59 tokens per step of a model that writes README.md, mlcbuild/README.md or engine/loop.py; (2,)
gives 1.98, 1.91 and 2.32, (4, 3) 1.97, 2.15 and 2.32, and (5, 4, 3, 2) at most 0.7 % more. The numbers
are counts of `ci/bench/constants --bundle BUNDLE drafts.SIZES`, with SmolLM2's tokens."""
BRANCH = 2
"""Maximum number of tokens on a branch, an alternative to the rest of a draft: later ones are rarely
accepted, as `ci/bench/speculation --set mlcbuild_runtime.engine.drafts.BRANCH=3` shows."""


@dataclass(frozen=True)
class Speculate:
    """The settings of speculative decoding."""

    draft: Path | None = None
    """Directory of the draft bundle, whose vocabulary must be the model's; None: draft tokens are looked up
    earlier in the sequence."""
    tokens: int = TOKENS
    """Maximum number of tokens in a draft of one sequence, those on its branches (alternatives to it)
    included."""
    branches: bool = True
    """True if branches (alternatives to a draft) are verified with the draft whenever that is expected to
    save time."""

    @classmethod
    def of(cls, how: str | Path, tokens: int | None = None) -> Speculate:
        """Returns the settings of speculative decoding. how: "lookup" for prompt lookup, or the directory of
        a draft bundle; tokens: maximum number of tokens in a draft, None (or 0) for the default, 8."""
        return cls(None if how == "lookup" else Path(how), tokens or TOKENS)


class Lookup:
    """Prompt lookup (Saxena, 2023), a source of drafts: proposes the tokens that followed the last few tokens
    earlier in the text.

    Only n-grams of at least two tokens are used, each with its latest occurrence.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        """N-gram of 2 to 4 tokens -> index, among all tokens of the text, of the token after the n-gram's
        latest occurrence."""
        self._others: dict[tuple[int, ...], int] = {}
        """N-gram of 2 to 4 tokens -> index, among all tokens of the text, of the latest token that followed
        the n-gram and differs from the token after its latest occurrence: a second continuation, for an
        alternative draft."""
        self._learned = 0
        """Number of tokens, from the beginning of the text on, that earlier calls have already searched for
        n-grams."""

    def _learn(self, tokens: Sequence[int]) -> None:
        places, others = self._places, self._others
        for end in range(self._learned, len(tokens)):
            for size in SIZES:
                if end >= size:
                    ngram = tuple(tokens[end - size : end])
                    latest = places.get(ngram)
                    if latest is not None and tokens[latest] != tokens[end]:
                        others[ngram] = latest
                    places[ngram] = end
        self._learned = len(tokens)

    def others(self, tokens: Sequence[int], draft: Sequence[int], count: int) -> list[Branch]:
        """Returns alternatives to `draft`, each a Branch of one or two tokens; [] if there are none. A branch
        begins where another token than the draft's followed the same n-gram earlier in the text. tokens: the
        whole text before the draft; each call must pass the same list, which may have grown. count: maximum
        number of tokens on all branches together."""
        self._learn(tokens)
        branches = list[Branch]()
        for start, token in enumerate(draft):
            text = (*tokens[-SIZES[0] :], *draft[:start])
            ngram = next((text[-size:] for size in SIZES if text[-size:] in self._places), None)
            for place in () if ngram is None else (self._places[ngram], self._others.get(ngram)):
                if place is not None and tokens[place] != token and count > 0:
                    branches.append(Branch(start, list(tokens[place : place + min(count, BRANCH)])))
                    count -= len(branches[-1].tokens)
        return branches

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns `count` draft tokens: those that followed the latest earlier occurrence of the text's last
        4, 3 or 2 tokens, repeated if the text ends before there are enough; [] without such an occurrence.
        tokens: the whole text; each call must pass the same list, which may have grown."""
        self._learn(tokens)
        for size in SIZES:
            place = self._places.get(tuple(tokens[-size:]))
            if place is not None:
                draft = list(tokens[place : place + count])
                while len(draft) < count:  # At the end of the text, the draft continues the repetition.
                    draft.append(draft[place - len(tokens)])
                return draft
        return []


class Prediction:
    """A source of draft tokens for one answer: the text that the client expects as the answer (OpenAI's
    predicted output), such as a text in which the model changes a few places."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._answered, self._place = list(tokens), 0, 0
        self._places: dict[tuple[int, ...], int] = {}
        """N-gram of 2 to 4 tokens -> index, in the client's prediction of the answer, of the token that
        followed the n-gram's first occurrence."""
        for end in range(len(self._tokens), 0, -1):
            for size in SIZES:
                if end >= size:
                    self._places[tuple(self._tokens[end - size : end])] = end

    def propose(self, answer: Sequence[int], count: int) -> list[int]:
        """Returns up to `count` draft tokens: those that follow the answer so far in the client's prediction.
        Where the answer deviates from it, drafts continue after the first occurrence, in the prediction, of
        the answer's last 4, 3 or 2 tokens; [] if these do not occur there, or at the prediction's end.
        answer: all tokens of the answer; each call must pass the same answer, which may have grown."""
        more = list(answer[self._answered :])
        self._answered = len(answer)
        place = self._place + len(more)
        if place <= len(self._tokens) and self._tokens[self._place : place] == more:
            self._place = place
        else:
            places = (self._places.get(tuple(answer[-size:])) for size in SIZES if len(answer) >= size)
            self._place = next((place for place in places if place is not None), len(self._tokens))
        return self._tokens[self._place : self._place + count]


class Credit:
    """Limits the drafts of a sequence to what earlier drafts have saved.

    The balance is in tokens: accepted draft tokens minus the cost of verification. A sequence starts with a
    small balance, earns a little with each token that had no draft, and drafts while the balance is positive.
    So drafts that are always wrong cost a token or two at first and about 2 percent of the time later.
    """

    _FIRST, _MOST, _GIFT, _LONGEST = 1.5, 6.0, 0.02, 16

    def __init__(self) -> None:
        self.balance, self.length = self._FIRST, 4

    def affordable(self, most: int) -> int:
        return min(self.length, most) if self.balance > 0 else 0

    def rest(self) -> None:
        """Adds 0.02 tokens to the number of tokens that a sequence may spend on drafts (at most 6 in all),
        because a step has computed a token without a draft."""
        self.balance = min(self._MOST, self.balance + self._GIFT)

    def settle(self, drafted: int, accepted: int, price: float, gained: int = 0) -> None:
        """Updates the number of tokens that a sequence may still spend on drafts, after a draft was verified:
        adds `accepted` - `drafted` * `price`, up to 6 in all; the number may become negative. Also sets the
        maximum length of the next draft: after full acceptance twice the previous maximum, up to 16, else
        `accepted` + `gained` + 1. drafted, accepted: numbers of tokens of the draft that were verified and
        accepted; price: cost of one draft token, in tokens computed without drafts; gained: number of tokens
        accepted after them on a branch, an alternative to the rest of the draft."""
        self.balance = min(self._MOST, self.balance + accepted - drafted * price)
        self.length = min(2 * self.length, self._LONGEST) if accepted == drafted else accepted + gained + 1


class Odds:
    """Decides whether it saves time to verify branches (alternatives to the rest of a draft) together with
    the draft, from the acceptance rate of earlier branches.

    A sequence starts with an assumed rate, to which the estimate slowly returns while there are no branches.
    """

    _FIRST, _WEIGHT, _PACE, _BACK = 0.15, 1 / 24, 1 / 8, 1 / 500

    def __init__(self) -> None:
        self.rate = self._FIRST
        """Estimated acceptance rate, from 0 to 1, of draft tokens on branches, the alternatives to the rest
        of a draft that are verified in the same step."""
        self.pace = 1.0
        """Moving average of the number of tokens that one decode step with a draft adds to the answer of this
        sequence."""

    def worthwhile(self, pace: float, shares: Sequence[float]) -> int:
        """Returns how many tokens to draft on branches (alternatives to the rest of a draft, verified in the
        same decode step): the number, at most len(shares), that is expected to save most time; 0 if none
        saves any.

        pace: number of tokens that the step yields for all sequences; shares: shares[i] is the time that i +
        1 tokens on branches add, as a fraction of the step's time.
        """
        gains = [(self.rate * count - pace * share, count) for count, share in enumerate(shares, 1)]
        gain, count = max(gains, default=(0.0, 0))
        return count if gain > 0 else 0

    def settle(self, branched: int, gained: int, added: int) -> None:
        """Updates, after a step in which the sequence had a draft, the estimated acceptance rate of draft
        tokens on branches (alternatives to the rest of a draft) and the average number of tokens per step.
        branched, gained: numbers of tokens on branches that the step verified and accepted; added: number of
        all tokens that it added to the answer."""
        self.pace += (added - self.pace) * self._PACE
        self.rate += (gained - self.rate * branched) * self._WEIGHT
        if not branched:
            self.rate += (self._FIRST - self.rate) * self._BACK


class Prices:
    """Estimates the cost of drafts from measured times of steps. It uses the shortest times, since other
    steps were delayed by other work."""

    _GUESS = 0.2
    """Assumed fraction of a decode step's time that each draft token adds, before the first measurement."""
    _FORGET = 1.01
    """Factor by which the remembered shortest time of a kind of step grows with each further measurement of
    that kind, because steps become slower as texts become longer.
    """

    _TRIES = 2
    """Minimum number of measurements of a kind of step before its shortest time decides how many tokens a
    step drafts; for the cost of a draft token one is enough. Steps are of one kind if they compute equally
    many tokens and verify equally many draft tokens, both in drafts and on their branches."""

    def __init__(self) -> None:
        self._best: dict[tuple[int, int, int], float] = {}
        self._tried: Counter[tuple[int, int, int]] = Counter()

    def observe(self, batch: int, drafted: int, seconds: float, branched: int = 0) -> None:
        """Records the measured time of a step; how many tokens are drafted follows from these times. batch:
        number of tokens that the step computed besides draft tokens; drafted: number of draft tokens;
        branched: number of further draft tokens on branches, alternatives to the drafts; seconds: time of the
        step and of drafting, as the executor measures it: CPU time of the engine's thread on CPUs, wall time
        on GPUs."""
        kind = batch, drafted, branched
        self._best[kind] = min(seconds, self._best.get(kind, math.inf) * self._FORGET)
        self._tried[kind] += 1

    def _time(self, batch: int, drafted: int, branched: int = 0) -> float | None:
        kind = batch, drafted, branched
        return self._best[kind] if self._tried[kind] >= self._TRIES else None

    def price(self, batch: int, drafted: int) -> float:
        """Returns the cost of verifying one draft token, as the number of tokens that could be computed
        without drafts in the same time. If steps with and without these drafts were not both measured, each
        draft token is assumed to add a fifth of the time of the step without drafts. batch: number of tokens
        that the step computes besides the drafts; drafted: number of draft tokens, at least 1."""
        undrafted_time, drafted_time = self._best.get((batch, 0, 0)), self._best.get((batch, drafted, 0))
        extra = (
            drafted * self._GUESS
            if undrafted_time is None or drafted_time is None
            else max(0.0, drafted_time / undrafted_time - 1)
        )
        return extra * batch / drafted

    def best(self, batch: int, most: int) -> int:
        """Returns the number of draft tokens, of all sequences together and at most `most`, with which a step
        yields most tokens per second if all are accepted; `most` without measurements, never 0 unless `most`
        is. batch: number of tokens that the step computes besides draft tokens.

        Kernels compute the tokens of a step in groups, and the first token of a group costs as much as the
        whole group. A number of draft tokens without measurements is assumed to take as long as the next
        smaller one.
        """
        longest, best = 0.0, (0.0, most)
        for drafted in range(most + 1):
            longest = max(longest, self._time(batch, drafted) or 0.0)
            if longest and drafted:
                best = max(best, ((batch + drafted) / longest, drafted))
        return best[1]

    def share(self, batch: int, drafted: int, branched: int) -> float:
        """Returns the time that `branched` draft tokens on branches (alternatives to the rest of drafts) add
        to a step, as a fraction of the step's time without them. If no step with branches was measured, the
        time of a step with as many more tokens in the drafts themselves is used. Infinite if that time, or
        the time without branches, was not measured. batch: number of tokens that the step computes besides
        draft tokens; drafted: number of tokens in drafts."""
        undrafted_time, longer = self._time(batch, drafted), self._time(batch, drafted + branched)
        if undrafted_time is None or longer is None:
            return math.inf
        return max(0.0, (self._time(batch, drafted, branched) or longer) / undrafted_time - 1)
