"""One request on its way through the engine: its tokens, its pages and its next token."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as List
from itertools import accumulate
from typing import NamedTuple

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.client_stream import ClientStream
from mlcbuild_runtime.engine.draft_state import DraftState
from mlcbuild_runtime.engine.pages import Key, PageKeys
from mlcbuild_runtime.engine.pooling import Pooler
from mlcbuild_runtime.engine.request import Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.engine.sampler import Sampler, runner_up
from mlcbuild_runtime.executor.batch import Mask, NextInput
from mlcbuild_runtime.executor.executor import StepOutput
from mlcbuild_runtime.executor.sampling_params import (
    SKIP,
    Floats,
    PromptScores,
    Sample,
    SamplingRow,
    logprobs,
)
from mlcbuild_runtime.text.tokenizer import Tokenizer

MAX_FORCED = 15
"""Maximum number of tokens forced by a constraint that are appended between two sampled tokens."""
STOP_STEPS = 4
"""Maximum number of decode steps before tokens are delivered, if a stop string or stop token may end the
answer: steps after its end are wasted. `ci/bench/step` measures what several steps in one call save."""


class SequenceRows(NamedTuple):
    """The rows of logits, among those of one step, that belong to one sequence."""

    result: StepOutput
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def token(self, row: int) -> int:
        """Returns the token that the device sampled from row `row` of the sequence's rows, counted from 0; -2
        if none was to be sampled, -1 if a logit is NaN or the largest one is infinite."""
        return self.result.tokens[self.start + row]

    def logits(self) -> Floats:
        """Returns the logits that the step has computed for this sequence, float32 [rows, vocabulary]: one
        row for each of its tokens whose logits were requested, after the device has applied logit masks. Must
        be called before the next step."""
        return self.result.logits()[self.start : self.stop]

    def last(self, count: int) -> SequenceRows:
        return SequenceRows(self.result, self.stop - count, self.stop)


class Sequence:
    """A waiting or running request. A preemption frees its pages and keeps everything that decides its
    tokens."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        ticket: Ticket,
        tokenizer: Tokenizer,
        sample: Sample,
        matcher: Matcher | None = None,
    ) -> None:
        """Creates a waiting sequence for a request, whose max_tokens must be a number that fits the context.
        sink: function that receives the events of the answer; ticket: handle with which the client cancels or
        pauses the request; sample: function that samples tokens from logits; matcher: follows the request's
        constraint, None without one."""
        self.request = request
        self.order = 0
        """The number of the request in order of arrival, from 0; set when the engine takes the request from
        its queue, and 0 until then."""
        self.tokens = list(request.prompt)
        self.length = 0
        """Number of the sequence's tokens whose keys and values are in the KV cache."""
        self.pages: list[int] = []
        self.cached: int | None = None
        """Number of prompt tokens in the prefix cache when the request was first admitted; None before."""
        # With a constraint, the grammar decides where the answer may end.
        ignore_eos = request.ignore_eos and matcher is None
        self.client = ClientStream(request, sink, ticket, tokenizer, ignore_eos)
        self.draft = DraftState(request.prediction)
        self.sampler = Sampler(request, sample, matcher)
        self.scores = PromptScores(request.prompt, request.logprobs or 0)
        self.pool = None if request.pooling is None else Pooler(request.pooling)
        self._keys = PageKeys(len(request.prompt))

    @property
    def rank(self) -> tuple[int, int]:
        """Returns the sort key of the request: the lowest (priority, order of arrival) goes first."""
        return self.request.priority, self.order

    @property
    def resting(self) -> bool:
        """Returns True while the request is paused because its client does not read events fast enough."""
        return self.client.ticket.resting

    @property
    def prefilling(self) -> bool:
        return self.length < len(self.request.prompt)

    @property
    def complete(self) -> bool:
        """Returns True if the keys and values of all tokens of the sequence are in the KV cache: the next
        token is sampled from the logits of the step that has computed the last one."""
        return self.length == len(self.tokens)

    @property
    def answered(self) -> int:
        """Returns the number of tokens that the answer has so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def constrained(self) -> bool:
        return self.sampler.constrained

    @property
    def mask(self) -> Mask | None:
        """Returns the logit mask, int32 words with one bit per token, 1 if it is allowed, under which the
        device samples the next token of the answer in the coming step; None if it samples from all tokens,
        and a constraint is checked afterwards."""
        return self.sampler.mask

    @property
    def _plain(self) -> bool:
        """Returns True if the device can sample the sequence's tokens, and no log-probabilities of the prompt
        are needed."""
        return self.sampler.plain and not self.request.prompt_logprobs

    @property
    def steps_ahead(self) -> int:
        """Returns the maximum number of decode steps that may be executed for this sequence, the coming one
        included, before a token must be delivered to its client; 0 if it needs steps of its own, as for a
        draft, a penalty or log-probabilities, at most 4 with stop strings or stop tokens."""
        request = self.request
        ready = self.length + 1 == len(self.tokens) and not self.draft.tokens
        if not ready or request.sampling.adjusts or request.prompt_logprobs or request.logprobs is not None:
            return 0
        return min(self.remaining, STOP_STEPS) if request.stop or request.stop_tokens else self.remaining

    @property
    def remaining(self) -> int:
        """Returns the number of tokens that may still be added to the answer: at most max_tokens in all, and
        no more events than the client may still leave unread."""
        remaining, room = (self.request.max_tokens or 0) - self.answered, self.client.ticket.room
        return remaining if room is None else min(remaining, room)

    def keys(self, page_size: int, length: int) -> List[Key]:
        """Returns the keys (tuples of integers) that identify the contents of the KV cache pages which the
        first `length` tokens of the sequence fill; [] if the pages must not be shared, because
        log-probabilities of the prompt or a mean embedding are requested, which need all tokens computed.
        page_size: number of tokens in a page."""
        if self.request.prompt_logprobs or (self.pool is not None and self.pool.kind == "mean"):
            return []  # Cached pages lack the logits, or hidden states, of their tokens.
        return self._keys.of(self.tokens, length, page_size, -1 - self.order)

    def sampling_params(self, count: int) -> list[SamplingRow]:
        """Returns the sampling parameters of each row of logits that a step computes for this sequence: one
        for the last computed token and one for each draft token, branches included, or one for every computed
        token while log-probabilities of the prompt are computed. A row is SKIP if the device must not sample
        its token; the host samples it later, if at all. Sets the sequence's logit mask for the step. count:
        number of tokens that the step computes, the draft's included, but not those of branches."""
        sampler, draft, row_count = self.sampler, self.draft, 1 + self.draft.size
        sampler.mask = None
        last = self.length + count - len(draft.tokens) == len(self.tokens) and self.request.max_tokens
        if row_count == 1 and last and self._plain:
            return [sampler.params(self.answered)]
        rows = count if self.request.prompt_logprobs and self.prefilling else row_count
        if not last or self.request.sampling.adjusts:
            return [SKIP] * rows
        params = [sampler.first_params(self.answered)]
        if draft.tokens and not sampler.constrained:
            depths = (depth for _, depth in draft_tree.rows(draft.tokens, draft.branches))
            params = [sampler.params(self.answered + depth) for depth in depths]
        return [SKIP] * (rows - row_count) + params + [SKIP] * (row_count - len(params))

    def random_numbers(self, count: int) -> list[float]:
        """Returns the random numbers, in [0, 1), for `count` tokens of the answer after the next one; the
        next one has its number in the result of `sampling_params`."""
        return self.sampler.random_numbers(self.answered + 1, count)

    def next_input(self) -> NextInput | None:
        """Returns the sequence's input for one more decode step before tokens are delivered: (last token,
        random number for sampling the next one, logit mask or None). Returns None if tokens must be delivered
        first."""
        number = self.sampler.next_number(self.answered)
        return None if number is None else NextInput(self.tokens[-1], number, self.sampler.mask)

    def advance(self, rows: SequenceRows) -> bool:
        """Appends the token that a decode step has sampled to the sequence, without an event for the client.
        Returns True if another step may follow. Returns False if the token, which is appended all the same,
        is an end-of-sequence or stop token, or if an error occurred, which is kept for `take_events`; the
        client must then receive its tokens before the next step."""
        self.length += 1
        try:
            self._append(token := self.sampler.token(lambda: rows.logits()[0], rows.token(0), self.answered))
        except ServingError as error:
            self.client.error = error
            return False
        self.client.unsent += 1
        return not self.client.is_end(token)

    def take_events(self) -> list[Event]:
        """Returns the events for the client, one per token, of the tokens that decode steps have appended
        without delivering them, then those of tokens that the constraint forces to follow, or of an error."""
        client, events = self.client, list[Event]()
        for position in range(self.answered - client.unsent, self.answered):
            events.append(self._event_at(position))
            if events[-1].last:
                return events
        if client.error is not None:
            events.append(self.failure(client.error))
        client.unsent = 0
        return self._with_forced(events)

    def consume(self, rows: SequenceRows) -> list[Event]:
        """Appends the tokens that a step has sampled for this sequence: one, and one more for each accepted
        draft token; then the tokens that the constraint forces. Returns an event for the client of each; an
        error (invalid logits, or a constraint that is too costly to follow) is the last event instead of an
        exception. The first event also holds the log-probabilities of the prompt, if requested. If max_tokens
        is 0, nothing is appended, and the only event ends the answer."""
        if not self.draft.tokens and self.request.max_tokens and self._plain:
            return self._verify(rows)
        if self.request.max_tokens:
            events = self._with_forced(self._verify(rows))
        else:
            events = [self._event(finish="length")]
        scores = self.scores.take()
        return [events[0]._replace(prompt=scores), *events[1:]] if scores else events

    def _with_forced(self, events: list[Event]) -> list[Event]:
        """Appends to the answer, without sampling, up to 15 (MAX_FORCED) tokens that the constraint forces to
        follow, fewer if the client may leave fewer unread, and none if the last of `events` ends the answer.
        Appends their events for the client, or that of an error, to `events`, and returns it."""
        if self.sampler.constrained and events and not events[-1].last:
            events += self._forced(len(events))
            if not events[-1].last:
                self.sampler.prepare(self.answered)
        return events

    def _verify(self, rows: SequenceRows) -> list[Event]:
        """Samples tokens along the sequence's draft tree (the draft and its alternatives) and appends them to
        the answer, up to and including the first one that is not among the draft tokens there, or that ends
        the answer. Returns an event for the client of each; an error is the last event instead of an
        exception."""
        draft = self.draft
        draft.branch_gain = draft.best_path = 0
        if not draft.tokens:
            return [self._draw(rows, 0, ())]
        draft.rejected += draft.size
        children, row = draft_tree.children(draft.tokens, draft.branches), 0
        events = [self._draw(rows, row, children[row])]
        while not events[-1].last and self.tokens[-1] in children[row]:
            row = children[row][self.tokens[-1]]
            self.length += 1
            draft.branch_gain += row > len(draft.tokens)
            events.append(self._draw(rows, row, children[row]))
        draft.best_path = draft_tree.rows(draft.tokens, draft.branches)[row][0]
        draft.tokens = []
        return events

    def _draw(self, rows: SequenceRows, row: int, drafted: Container[int]) -> Event:
        """Samples a token from row `row` of a step's logits, appends it to the answer and returns its event
        for the client; an error is an event, too. drafted: the tokens that the draft tree has at this
        position, of which a sampled one counts as an accepted draft token."""
        scored = self.request.logprobs
        logits = None if scored is None else rows.logits()[row]
        try:
            token = self.sampler.token(
                # Log-probabilities are reported before penalties and masks.
                (lambda: rows.logits()[row]) if logits is None else logits.copy,
                rows.token(row),
                self.answered,
            )
            if token in drafted:
                self.draft.accepted += 1
                self.draft.rejected -= 1
            self._append(token)
            event = self._event_at(self.answered - 1)
        except ServingError as error:
            return self.failure(error)
        if logits is None or scored is None:
            return event
        logprob, alternatives = logprobs(logits, token, scored)
        return event._replace(logprob=logprob, alternatives=alternatives)

    def _append(self, token: int) -> None:
        self.sampler.add(token)
        self.tokens.append(token)
        self.client.stopwatch.token()

    def _forced(self, unsent: int) -> list[Event]:
        """Appends to the answer up to MAX_FORCED (15) tokens that must follow, because the constraint allows
        no others; the model computes them together with the next one. Returns an event for the client of
        each; an error is the last event instead of an exception. unsent: number of earlier events that are
        not delivered yet, which reduce the number of tokens if the client may leave only so many unread."""
        room = self.client.ticket.room
        count = MAX_FORCED if room is None else min(MAX_FORCED, room - unsent)
        events: list[Event] = []
        try:
            for token in self.sampler.forced(count) if count > 0 else ():
                self._append(token)
                events.append(self._event_at(self.answered - 1))
                if events[-1].last:
                    break
        except ServingError as error:
            events.append(self.failure(error))
        return events

    def allowed(self, draft: list[int]) -> list[int]:
        """Returns the longest beginning of a draft that the sequence's constraint allows; the whole draft
        without a constraint."""
        return self.sampler.allowed(draft)

    def propose(self, logits: Floats) -> bool:
        """Samples the next draft token of the sequence and appends it to the draft. logits: one row of the
        draft model's logits, for the position after the draft. Returns False if the draft must end there: the
        appended token ends the text, or no token could be sampled and nothing was appended."""
        draft = self.draft
        if not draft.tokens:
            draft.doubts = []
        try:
            token = self.sampler.propose(logits, self.answered, draft.tokens)
        except ServingError:
            return False
        draft.tokens.append(token)
        draft.doubts.append(runner_up(logits, token))
        return token not in self.client.eos

    def add_states(self, states: Floats) -> Event | None:
        """Adds the hidden states, float32 [n, hidden], of the last n computed tokens to the embedding, which
        is pooled as the request states (last token or mean). The sequence's length must include these
        already. Returns the event with the embedding if all tokens of the input are added, else None."""
        assert self.pool is not None
        if self.length == len(states):
            self.pool.clear()
        self.pool.add(states)
        if not self.complete:
            return None
        return Event(finish="stop", vector=self.pool.vector(), cached=self.cached or 0)

    def failure(self, error: ServingError) -> Event:
        return self._event(error=error)

    def _event_at(self, position: int) -> Event:
        """Converts the token at index `position` of the answer to text and returns its event for the client.
        Must be called once for each token, in order, because a character may consist of several tokens."""
        token = self.tokens[len(self.request.prompt) + position]
        done = position + 1 == self.answered and self.sampler.finished
        text, finish = self.client.text(token, position, done)
        return self._event(text, finish, tokens=position + 1)

    def _event(
        self,
        text: str = "",
        finish: Finish | None = None,
        error: ServingError | None = None,
        tokens: int | None = None,
    ) -> Event:
        """Returns an event for the client of this request: a token's text, the end, or an error, with the
        numbers of answered, cached, accepted draft and rejected draft tokens so far. tokens: length of the
        answer up to this event (default: the whole answer)."""
        count = self.answered if tokens is None else tokens
        draft = self.draft
        return Event(
            text,
            count,
            finish,
            error,
            cached=self.cached or 0,
            accepted=draft.accepted,
            rejected=draft.rejected,
            times=None if finish is None else self.client.stopwatch.times(),
        )


def masks_of(sequences: List[Sequence], counts: List[int]) -> list[tuple[int, Mask]]:
    """Returns the logit masks of a step, for the sequences that have one, as pairs: index, counted over the
    whole step, of the row of logits from which the sequence's next token is sampled; mask, int32 words with
    one bit per token, 1 if it is allowed. counts: number of rows of logits of each sequence; its draft tokens
    have the last of these rows, and the mask applies to the row before them."""
    starts = accumulate(counts, initial=0)
    return [
        (start + count - 1 - sequence.draft.size, sequence.mask)
        for sequence, count, start in zip(sequences, counts, starts, strict=False)
        if sequence.mask is not None
    ]
