"""One request on its way through the engine: its tokens, its place in the cache, its next token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from collections.abc import Sequence as List
from contextlib import suppress
from copy import copy
from itertools import accumulate

from mlcbuild_runtime import tree
from mlcbuild_runtime.drafts import Credit, Lookup, Odds, Prediction
from mlcbuild_runtime.errors import ServingError
from mlcbuild_runtime.grammar import Mask, Matcher, Trust
from mlcbuild_runtime.pages import Key
from mlcbuild_runtime.pooling import Pool
from mlcbuild_runtime.request import Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.sampling import (
    NONE,
    SKIPPED,
    Choose,
    Floats,
    Numbers,
    Scores,
    Way,
    adjusted,
    checked,
    generator,
    logprobs,
)
from mlcbuild_runtime.text import Tokenizer
from mlcbuild_runtime.tree import Branch

FORCED = 15
"""Tokens that a constraint may force between two that the model chooses."""
STOPPING = 4
"""Steps of decoding at once, at most, where a text may end the answer: those after it are in vain."""


class Sequence:
    """A waiting or running request. Everything that decides its tokens stays when its pages go."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        ticket: Ticket,
        tokenizer: Tokenizer,
        choose: Choose,
        matcher: Matcher | None = None,
    ) -> None:
        """`request` has a max_tokens that fits the context. `matcher`: of its constraint."""
        self.request, self.sink, self.ticket = request, sink, ticket
        self._choose = choose
        self.order = 0
        """Of arrival; given by the engine."""
        self.tokens = list(request.prompt)
        self.length = 0
        """Tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.cached: int | None = None
        """Tokens that the prefix cache had when it was first admitted; None before."""
        self.deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self.draft: list[int] = []
        """Tokens that may follow, to be checked in the next step."""
        self.branches: list[Branch] = []
        """Others that may follow instead, checked in the same step."""
        self.taken = 0
        """The path of the last tree of drafts that was right, as far as any was."""
        self.gained = 0
        """Tokens of that path that are on branches."""
        self.mask: Mask | None = None
        """Of tokens that may be chosen from the first row of the coming step that chooses any."""
        self.draft_length = 0
        """Tokens whose keys and values are in the cache of a draft model."""
        self.credit, self.odds = Credit(), Odds()
        self.lookup, self.prediction = Lookup(), Prediction(request.prediction)
        self.doubts: list[tuple[float, int]] = []
        """For each token of a draft model's draft: how far it is ahead of another one, and which."""
        self.accepted = self.rejected = 0
        self._scores = Scores(request.prompt, request.logprobs or 0)
        self._keys: list[Key] = []
        random = generator(request.sampling)
        self._numbers, self._others = Numbers(random), Numbers(random.spawn(1)[0])
        self._stream = tokenizer.stream(request.stop, request.message, dict(request.shown))
        self._eos = tokenizer.eos
        self._counts: Counter[int] = Counter()
        self._matcher, self._trust = matcher, Trust()
        self.pool = None if request.pooling is None else Pool(request.pooling)
        self._plain = matcher is None and not request.sampling.adjusts and not request.prompt_logprobs
        """Its tokens are what the library chooses."""

    @property
    def rank(self) -> tuple[int, int]:
        """Sooner is lower."""
        return self.request.priority, self.order

    @property
    def prefilling(self) -> bool:
        return self.length < len(self.request.prompt)

    @property
    def complete(self) -> bool:
        """Nothing is left to feed: the next token is to be chosen."""
        return self.length == len(self.tokens)

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def keys(self, page_size: int, length: int) -> List[Key]:
        """Of the pages that the first `length` tokens fill.

        Pages with tokens of the answer have a key of this sequence's own: another request prefills these
        tokens, and the kernels of prefill and decode need not round alike. So no answer depends on what the
        cache happens to hold.
        """
        if self.request.prompt_logprobs or (self.pool is not None and self.pool.kind == "mean"):
            return []  # the cache has keys and values of a prompt, but not the states of all its tokens
        for end in range(len(self._keys) * page_size + page_size, length + 1, page_size):
            block = tuple(self.tokens[end - page_size : end])
            own = end > len(self.request.prompt)
            self._keys.append((-1 - self.order, *block) if own else block)
        return self._keys[: length // page_size]

    def ways(self, count: int) -> list[Way]:
        """How tokens are chosen from the rows of `count` new tokens, and all drafted ones, whose logits are
        needed. Where that depends on tokens that other rows have still to give, it is left to `next`."""
        own, sampling, self.mask = 1 + self.drafted, self.request.sampling, None
        if self._plain and own == 1 and self.length + count == len(self.tokens) and self.request.max_tokens:
            return [(*sampling.way, self._numbers.at(self.answered))]
        rows = count if self.request.prompt_logprobs and self.prefilling else own
        last = self.length + count - len(self.draft) == len(self.tokens) and self.request.max_tokens
        if not last or sampling.adjusts:
            return [SKIPPED] * rows
        if self._matcher is not None and not self._tries:
            return [SKIPPED] * (rows - own) + self._masked(self._matcher) + [SKIPPED] * (own - 1)
        places = [self.answered]
        if self.draft and self._matcher is None:
            places = [self.answered + depth for _, depth in tree.rows(self.draft, self.branches)]
        ways: list[Way] = [(*sampling.way, self._numbers.at(place)) for place in places]
        return [SKIPPED] * (rows - own) + ways + [SKIPPED] * (own - len(places))

    def _masked(self, matcher: Matcher) -> list[Way]:
        """The way of a row from which only tokens that the constraint allows are chosen."""
        if self.request.logprobs is not None:  # these are of all tokens
            return [SKIPPED]
        try:
            self.mask = matcher.mask()
        except ServingError:  # told by `next`
            return [SKIPPED]
        return [(*self.request.sampling.way, self._others.at(self.answered))]

    @property
    def _tries(self) -> bool:
        """What the model wants is tried before the constraint's mask is computed."""
        return self._trust.due(self.answered) and not self.request.sampling.filters

    @property
    def reach(self) -> int:
        """Steps of decoding in which it can go on with what the library chooses, before anybody sees that."""
        request = self.request
        if (
            not self._plain
            or self.draft
            or self.length + 1 != len(self.tokens)
            or request.logprobs is not None
        ):
            return 0
        limits = [(request.max_tokens or 0) - self.answered]
        if self.ticket.room is not None:
            limits.append(self.ticket.room)
        return min(*limits, STOPPING) if request.stop else min(limits)

    def numbers(self, count: int) -> list[float]:
        """The random numbers for `count` tokens after the next one."""
        return self._numbers.some(self.answered + 1, count)

    def follow(self, tokens: List[int]) -> list[Event]:
        """Takes tokens that the library has chosen one after the other, up to the end of the answer."""
        events: list[Event] = []
        for token in tokens:
            try:
                events.append(self._taken(checked(token)))
            except ServingError as error:
                events.append(self.failed(error))
            if events[-1].last:
                break
        return events

    def score(self, rows: Floats) -> None:
        """Takes logits [n, vocab] of the last n tokens in the cache: what follows them in the prompt is
        scored, once."""
        self._scores.add(rows, self.length - len(rows) + 1)

    @property
    def drafted(self) -> int:
        """Tokens of the draft and its branches."""
        return len(self.draft) + self.branched

    @property
    def branched(self) -> int:
        return sum(len(branch.tokens) for branch in self.branches)

    def next(self, rows: Floats, chosen: List[int]) -> list[Event]:
        """Takes tokens from logits [1 + drafted, vocab]: one, and one more for each drafted token that was
        chosen. chosen: by `ways`, for each row. An error is an event, too."""
        if self._plain and not self.draft and self.request.max_tokens:
            return self._answer(rows, chosen)
        answers = self.request.max_tokens
        events = self._answer(rows, chosen) if answers else [self._event(finish="length")]
        if self._matcher is not None and not events[-1].last:
            events += self._forced(self._matcher, len(events))
            if not self._tries and not events[-1].last:
                with suppress(ServingError):  # told when it is needed
                    self._matcher.mask()
        scores = self._scores.told()
        return [events[0]._replace(prompt=scores), *events[1:]] if scores else events

    def _answer(self, rows: Floats, chosen: List[int]) -> list[Event]:
        self.gained = self.taken = 0
        if not self.draft:
            return [self._chosen((rows[0], chosen[0]), ())]
        self.rejected += self.drafted
        following, row = tree.children(self.draft, self.branches), 0
        events = [self._chosen((rows[row], chosen[row]), following[row])]
        while not events[-1].last and self.tokens[-1] in following[row]:
            row = following[row][self.tokens[-1]]
            self.length += 1
            self.gained += row > len(self.draft)
            events.append(self._chosen((rows[row], chosen[row]), following[row]))
        self.taken = tree.rows(self.draft, self.branches)[row][0]
        self.draft = []
        return events

    def _chosen(self, row: tuple[Floats, int], guesses: Container[int]) -> Event:
        try:
            return self._next(row, guesses)
        except ServingError as error:
            return self.failed(error)

    def pooled(self, states: Floats) -> Event | None:
        """Takes hidden states float32 [n, hidden] of the last n tokens in the cache; the answer after all."""
        assert self.pool is not None
        if self.length == len(states):
            self.pool.clear()
        self.pool.add(states)
        if not self.complete:
            return None
        return Event(finish="stop", vector=self.pool.vector(), cached=self.cached or 0)

    def failed(self, error: ServingError) -> Event:
        return self._event(error=error)

    def _event(
        self, text: str = "", finish: Finish | None = None, error: ServingError | None = None
    ) -> Event:
        """With what is known of the whole answer."""
        return Event(
            text,
            self.answered,
            finish,
            error,
            cached=self.cached or 0,
            accepted=self.accepted,
            rejected=self.rejected,
        )

    def _next(self, row: tuple[Floats, int], guesses: Container[int]) -> Event:
        """From a row of logits and what was chosen from it by `ways`."""
        logits, token = row
        if self.mask is not None and token != NONE:
            token, self.mask = checked(token), None
        elif self._matcher is not None or token < 0:
            token = self._choice(row, self._matcher, [], self._trust)
        if token in guesses:
            self.accepted += 1
            self.rejected -= 1
        if self.request.logprobs is None:
            return self._taken(token)
        logprob, alternatives = logprobs(logits, token, self.request.logprobs)
        return self._taken(token)._replace(logprob=logprob, alternatives=alternatives)

    def _taken(self, token: int) -> Event:
        """The token is part of the answer."""
        if self._matcher is not None:
            self._matcher.take(token)
        self.tokens.append(token)
        if self.request.sampling.adjusts:
            self._counts[token] += 1
        text, finish = self._text(token)
        return self._event(text, finish)

    def _forced(self, matcher: Matcher, untold: int) -> list[Event]:
        """Tokens that the constraint leaves no choice about, so that nobody has to ask the model, which takes
        them in together with the next one. `untold`: events before them that nobody was told."""
        room = FORCED if self.ticket.room is None else min(FORCED, self.ticket.room - untold)
        if room <= 0 or self.request.logprobs is not None:  # only the model knows how likely tokens are
            return []
        events: list[Event] = []
        try:
            for token in matcher.forced(room):
                events.append(self._taken(token))
                if events[-1].last:
                    break
        except ServingError as error:
            events.append(self.failed(error))
        return events

    def _choice(
        self, row: tuple[Floats, int], matcher: Matcher | None, draft: List[int], trust: Trust
    ) -> int:
        """The token after all tokens and `draft`, from a row of logits and what was chosen from it by `ways`.
        It depends on nothing else but the logits, the seed and how well the answer has followed its
        constraint so far."""
        (logits, chosen), request, counts = row, self.request, self._counts
        if request.sampling.adjusts:
            counts = counts + Counter(draft) if draft else counts
            logits = adjusted(logits, request.sampling, request.prompt, counts)
        place = self.answered + len(draft)
        if matcher is not None:
            return self._fitting((logits, chosen), matcher, trust, place)
        return self._drawn(logits, self._numbers.at(place), chosen)

    def _drawn(self, logits: Floats, number: float, chosen: int = NONE) -> int:
        """Unless it was chosen before."""
        if chosen == NONE:
            (chosen,) = self._choose(logits[None], [(*self.request.sampling.way, number)])
        return checked(chosen)

    def _fitting(self, row: tuple[Floats, int], matcher: Matcher, trust: Trust, place: int) -> int:
        """A token that the constraint allows, as likely as it is among these: what the model wants where that
        is one of them, and else one that is chosen among them by another number (rejection sampling)."""
        logits, chosen = row
        if trust.due(place) and not self.request.sampling.filters and matcher.free:
            token = self._drawn(logits, self._numbers.at(place), chosen)
            trust.settle(place, fits := matcher.accepts(token))
            if fits:
                return token
        tokens, logits = matcher.narrowed(logits)
        chosen = self._drawn(logits, self._others.at(place))
        return chosen if tokens is None else int(tokens[chosen])

    def draft_limit(self, most: int) -> int:
        """Tokens to draft now, at most; 0: none."""
        limits = [(self.request.max_tokens or 0) - self.answered - 1]
        if self.ticket.room is not None:
            limits.append(self.ticket.room - 1)
        return max(0, min(self.credit.wanted(most), *limits))

    def allowed(self, draft: list[int]) -> list[int]:
        """As much of a draft as the constraint allows."""
        return draft if self._matcher is None else draft[: self._matcher.accepted(draft)]

    def guess(self, logits: Floats) -> bool:
        """One more token for the draft, from a draft model's logits. False: nothing can come after it."""
        if not self.draft:
            self.doubts = []
        try:
            matcher = None if self._matcher is None else self._matcher.after(self.draft)
            token = self._choice((logits, NONE), matcher, self.draft, copy(self._trust))
        except ServingError:
            return False
        self.draft.append(token)
        # What else is likely, without a copy of all logits.
        sides = (0, logits[:token]), (token + 1, logits[token + 1 :])
        height, other = max(
            (float(side.max()), first + int(side.argmax())) for first, side in sides if len(side)
        )
        self.doubts.append((float(logits[token]) - height, other))
        return token not in self._eos

    def _text(self, token: int) -> tuple[str, Finish | None]:
        """What the token adds to the answer, and whether that was all."""
        if token in self._eos and (self._matcher is not None or not self.request.ignore_eos):
            return self._stream.finish(), "stop"
        finish: Finish | None = None
        text = self._stream.push(token)
        if not self._stream.stopped and self.answered >= (self.request.max_tokens or 0):
            finish = "length"
            text += self._stream.finish()
        if self._matcher is not None and self._matcher.finished:
            finish = "stop"
            text += self._stream.finish()
        return text, "stop" if self._stream.stopped else finish


def masks_of(sequences: List[Sequence], ways: List[List[Way]]) -> list[tuple[int, Mask]]:
    """Masks of those sequences that have one, and the rows for which they are."""
    starts = accumulate(map(len, ways), initial=0)
    return [
        (start + len(own) - 1 - sequence.drafted, sequence.mask)
        for sequence, own, start in zip(sequences, ways, starts, strict=False)
        if sequence.mask is not None
    ]
