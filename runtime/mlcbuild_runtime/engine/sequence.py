"""One request on its way through the engine: its tokens, its place in the cache, its next token."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from collections.abc import Sequence as List
from itertools import accumulate

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.drafts import Credit, Lookup, Odds, Prediction
from mlcbuild_runtime.engine.pages import Key, Keys
from mlcbuild_runtime.engine.pooling import Pool
from mlcbuild_runtime.engine.request import Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.engine.sampler import Chooser, second
from mlcbuild_runtime.executor.batch import Further, Mask
from mlcbuild_runtime.executor.sampling_params import SKIPPED, Choose, Floats, Scores, Way, logprobs
from mlcbuild_runtime.text.tokenizer import Tokenizer

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
        self._chooser = Chooser(request, choose, matcher)
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
        self.draft_length = 0
        """Tokens whose keys and values are in the cache of a draft model."""
        self.credit, self.odds = Credit(), Odds()
        self.lookup, self.prediction = Lookup(), Prediction(request.prediction)
        self.doubts: list[tuple[float, int]] = []
        """For each token of a draft model's draft: how far it is ahead of another one, and which."""
        self.accepted = self.rejected = 0
        self.scores = Scores(request.prompt, request.logprobs or 0)
        self._keys = Keys(len(request.prompt))
        self._stream = tokenizer.stream(request.stop, request.message, dict(request.shown))
        self._eos = tokenizer.eos
        self._untold = 0
        """The last tokens, which were taken and not told yet."""
        self._fault: ServingError | None = None
        """What happened to the one after them."""
        self.pool = None if request.pooling is None else Pool(request.pooling)
        self._plain = self._chooser.plain and not request.prompt_logprobs
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
        """Of the pages that the first `length` tokens fill; see pages.Keys."""
        if self.request.prompt_logprobs or (self.pool is not None and self.pool.kind == "mean"):
            return []  # the cache has keys and values of a prompt, but not the states of all its tokens
        return self._keys.of(self.tokens, length, page_size, -1 - self.order)

    def ways(self, count: int) -> list[Way]:
        """How tokens are chosen from the rows of `count` new tokens, and all drafted ones, whose logits are
        needed. Where that depends on tokens that other rows have still to give, it is left to `next`."""
        chooser, own, chooser.mask = self._chooser, 1 + self.drafted, None
        last = self.length + count - len(self.draft) == len(self.tokens) and self.request.max_tokens
        if self._plain and own == 1 and last:
            return [chooser.way(self.answered)]
        rows = count if self.request.prompt_logprobs and self.prefilling else own
        if not last or self.request.sampling.adjusts:
            return [SKIPPED] * rows
        ways = [chooser.first_way(self.answered)]
        if self.draft and not chooser.constrained:
            ways = [chooser.way(self.answered + d) for _, d in draft_tree.rows(self.draft, self.branches)]
        return [SKIPPED] * (rows - own) + ways + [SKIPPED] * (own - len(ways))

    def further(self) -> Further | None:
        """What a step of decoding takes of it that follows another at once, where nothing is drafted. None:
        no step may."""
        number = self._chooser.further(self.answered)
        return None if number is None else Further(self.tokens[-1], number, self._chooser.mask)

    @property
    def mask(self) -> Mask | None:
        """Of tokens that may be chosen from the first row of the coming step that chooses any."""
        return self._chooser.mask

    @property
    def reach(self) -> int:
        """Steps of decoding in which it can go on before anybody is told of its tokens."""
        request, ready = self.request, self.length + 1 == len(self.tokens) and not self.draft
        if not ready or request.sampling.adjusts or request.prompt_logprobs or request.logprobs is not None:
            return 0
        return min(self.left, STOPPING) if request.stop else self.left

    @property
    def left(self) -> int:
        """Tokens that the answer, and the client's window, have room for."""
        left, room = (self.request.max_tokens or 0) - self.answered, self.ticket.room
        return left if room is None else min(left, room)

    @property
    def tended(self) -> bool:
        """Its next step depends on more than the token that the library has chosen."""
        return self._chooser.constrained

    def take(self, chosen: int, rows: Callable[[], Floats], row: int) -> bool:
        """Takes the token of a step without telling it, which `tell` does. False: no step may follow before.
        rows: gives the step's logits."""
        self.length += 1
        try:
            self._add(token := self._chooser.token((lambda: rows()[row], chosen), self.answered))
        except ServingError as error:
            self._fault = error
            return False
        self._untold += 1
        return not self._is_end(token)

    def tell(self) -> list[Event]:
        """Events of the tokens that `take` has taken."""
        events: list[Event] = []
        for place in range(self.answered - self._untold, self.answered):
            events.append(self._told(place))
            if events[-1].last:
                return events
        if self._fault is not None:
            events.append(self.failed(self._fault))
        self._untold = 0
        return self._followed(events)

    def numbers(self, count: int) -> list[float]:
        """The random numbers for `count` tokens after the next one."""
        return self._chooser.numbers(self.answered + 1, count)

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
        events = self._followed(self._answer(rows, chosen) if answers else [self._event(finish="length")])
        scores = self.scores.told()
        return [events[0]._replace(prompt=scores), *events[1:]] if scores else events

    def _followed(self, events: list[Event]) -> list[Event]:
        """The same, and those of tokens that the constraint leaves no choice about."""
        if self._chooser.constrained and events and not events[-1].last:
            events += self._forced(len(events))
            if not events[-1].last:
                self._chooser.prepare(self.answered)
        return events

    def _answer(self, rows: Floats, chosen: List[int]) -> list[Event]:
        self.gained = self.taken = 0
        if not self.draft:
            return [self._chosen((rows[0], chosen[0]), ())]
        self.rejected += self.drafted
        following, row = draft_tree.children(self.draft, self.branches), 0
        events = [self._chosen((rows[row], chosen[row]), following[row])]
        while not events[-1].last and self.tokens[-1] in following[row]:
            row = following[row][self.tokens[-1]]
            self.length += 1
            self.gained += row > len(self.draft)
            events.append(self._chosen((rows[row], chosen[row]), following[row]))
        self.taken = draft_tree.rows(self.draft, self.branches)[row][0]
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
        self,
        text: str = "",
        finish: Finish | None = None,
        error: ServingError | None = None,
        tokens: int | None = None,
    ) -> Event:
        """After so many tokens of the answer, or all, with what is known of the whole."""
        count = self.answered if tokens is None else tokens
        known = self.cached or 0, self.accepted, self.rejected
        return Event(text, count, finish, error, cached=known[0], accepted=known[1], rejected=known[2])

    def _next(self, row: tuple[Floats, int], guesses: Container[int]) -> Event:
        """From a row of logits and what was chosen from it by `ways`."""
        logits, chosen = row
        scored = self.request.logprobs
        given = (lambda: logits) if scored is None else logits.copy  # scores are of logits as they are
        token = self._chooser.token((given, chosen), self.answered)
        if token in guesses:
            self.accepted += 1
            self.rejected -= 1
        self._add(token)
        event = self._told(self.answered - 1)
        if scored is None:
            return event
        logprob, alternatives = logprobs(logits, token, scored)
        return event._replace(logprob=logprob, alternatives=alternatives)

    def _add(self, token: int) -> None:
        """The token is part of the answer."""
        self._chooser.add(token)
        self.tokens.append(token)

    def _told(self, place: int) -> Event:
        """Of a token of the answer; those before it have been told."""
        text, finish = self._text(place)
        return self._event(text, finish, tokens=place + 1)

    def _forced(self, untold: int) -> list[Event]:
        """Tokens that the constraint leaves no choice about, so that nobody has to ask the model, which takes
        them in together with the next one. `untold`: events before them that nobody was told."""
        room = FORCED if self.ticket.room is None else min(FORCED, self.ticket.room - untold)
        events: list[Event] = []
        try:
            for token in self._chooser.forced(room) if room > 0 else ():
                self._add(token)
                events.append(self._told(self.answered - 1))
                if events[-1].last:
                    break
        except ServingError as error:
            events.append(self.failed(error))
        return events

    def allowed(self, draft: list[int]) -> list[int]:
        """As much of a draft as the constraint allows."""
        return self._chooser.allowed(draft)

    def guess(self, logits: Floats) -> bool:
        """One more token for the draft, from a draft model's logits. False: nothing can come after it."""
        if not self.draft:
            self.doubts = []
        try:
            token = self._chooser.guess(logits, self.answered, self.draft)
        except ServingError:
            return False
        self.draft.append(token)
        self.doubts.append(second(logits, token))
        return token not in self._eos

    def _is_end(self, token: int) -> bool:
        return token in self._eos and (self._chooser.constrained or not self.request.ignore_eos)

    def _text(self, place: int) -> tuple[str, Finish | None]:
        """What a token of the answer adds to it, and whether that was all."""
        token = self.tokens[len(self.request.prompt) + place]
        if self._is_end(token):
            return self._stream.finish(), "stop"
        finish: Finish | None = None
        text = self._stream.push(token)
        if not self._stream.stopped and place + 1 >= (self.request.max_tokens or 0):
            finish = "length"
            text += self._stream.finish()
        if place + 1 == self.answered and self._chooser.finished:
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
