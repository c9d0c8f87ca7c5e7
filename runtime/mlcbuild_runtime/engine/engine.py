"""Requests to batches. One thread owns the model; requests come in by a queue, tokens go out to sinks.

Every turn of the loop admits what fits, runs one chunk of prefill and then one step of decoding for all
sequences that have their prompt behind them: a long prompt delays the others by one chunk at a time. Each
call is all prefill or all decode, so that a sequence takes the same kernels, and gets the same tokens,
whatever it shares its batch with; one call for both would spare one reading of the weights for a chunk of
hundreds of tokens, which is not much, and would make answers depend on the neighbours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as List
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, chain
from queue import Empty, SimpleQueue

import numpy as np
from mlcbuild_format.errors import EngineError, RequestError

from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.devices.cpu import MOST_STEPS, Floats, Model
from mlcbuild_runtime.devices.threads import Task
from mlcbuild_runtime.engine import multi_step
from mlcbuild_runtime.engine.admission import answer_limit, longest_text
from mlcbuild_runtime.engine.engine_options import Role
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.request import Event, Request, Sink, State, Ticket, late
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence, masks_of
from mlcbuild_runtime.engine.speculation import Checked, Speculation, fanned
from mlcbuild_runtime.engine.trace import Trace
from mlcbuild_runtime.executor.batch import Step
from mlcbuild_runtime.executor.sampling_params import Way
from mlcbuild_runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests that may wait for a place by default; more are turned away."""
NAP = 0.2
"""Seconds between two looks at the clock while every request waits for its client."""
TELL = 0.04
"""Seconds, about, after which clients are told of their tokens."""


class Engine:
    """Runs a model for any number of clients. `start` it, `submit` from any thread, `close` it."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        max_batch: int | None = None,
        max_waiting: int | None = None,
        role: Role | None = None,
    ) -> None:
        """Raises BundleError for a draft bundle that does not fit."""
        role, chunk = role or Role(), model.limits.prefill_chunk
        self.name, self._turns = role.name or model.manifest.name, role.turns
        self.prefill_chunk = min(role.prefill_chunk or chunk, chunk)
        self.model, self.tokenizer = model, tokenizer
        self.pooling = role.pooling or model.manifest.serving.pooling
        self.max_batch = min(max_batch or model.limits.max_batch, model.limits.max_batch)
        self.grammars = Grammars(tokenizer.vocabulary, model.manifest.vocab_size, tokenizer.eos)
        self._max_waiting = MAX_WAITING if max_waiting is None else max_waiting
        self._incoming: SimpleQueue[Sequence | None] = SimpleQueue()
        pages, window = Pages(model.pages), model.manifest.window
        self._schedule = Schedule(pages, model.limits.page_size, self.max_batch, window)
        self._trace: Trace | None = None
        self._speculation = Speculation.load(role.speculate, model, tokenizer)
        self._drafted = self._accepted = 0
        self._closing, self._draining, self._door = False, False, threading.Lock()
        self._prompt_tokens = self._answer_tokens = self._decode_steps = self._order = self._arrived = 0
        self._pace: dict[int, float] = {}
        """Seconds that a step of decoding takes, by the number of sequences."""
        self._thread = Task(self._run)

    @cached_property
    def longest_text(self) -> int:
        """Bytes of a text above which its tokens do not fit the context."""
        return longest_text(self.model, self.tokenizer)

    def start(self, trace: Trace | None = None) -> Engine:
        """`trace`: where to note every step and request."""
        self._trace = trace
        self._thread.start()
        return self

    @property
    def ready(self) -> bool:
        """New requests are taken."""
        return self._thread.is_alive() and not self._draining and not self._closing

    def drain(self) -> None:
        """Takes no more requests; those it has go on."""
        with self._door:
            self._draining = True

    def close(self, timeout: float = 1.0) -> bool:
        """Ends every request with an error. False when a step still runs after `timeout` seconds."""
        self._stop_taking()
        self.tokenizer.template.close()
        self.grammars.close()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def state(self) -> State:
        schedule = self._schedule
        waiting = self._arrived - self._order + len(schedule.waiting)  # first: they go on to run
        return State(
            running=len(schedule.active),
            waiting=waiting,
            free_pages=schedule.pages.available,
            cached_pages=schedule.pages.cached,
            pages=self.model.pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=schedule.cached_tokens,
            answer_tokens=self._answer_tokens,
            decode_steps=self._decode_steps,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            preemptions=schedule.preemptions,
            alive=self._thread.is_alive(),
        )

    def submit(self, request: Request, sink: Sink, window: int | None = None) -> Ticket:
        """Takes a request on.

        window: events that may be told and not yet `read` from the ticket; the request rests at that number.
        Raises RequestError when it cannot be served, EngineError after the end.
        """
        request = replace(request, max_tokens=answer_limit(request, self.model))
        matcher = None if request.constraint is None else request.constraint.matcher()
        ticket = Ticket(partial(self._send, None), window)
        sequence = Sequence(request, sink, ticket, self.tokenizer, self.model.choose, matcher)
        with self._door:
            if self._closing or not self._thread.is_alive():
                raise EngineError("the engine is stopped")
            if self._draining:
                raise RequestError("the server is stopping: try another", code="stopping", status=503)
            if self.state().waiting >= self._max_waiting:
                raise RequestError(
                    f"{self._max_waiting} requests are waiting already: try later",
                    code="overloaded",
                    status=503,
                )
            if self._trace is not None:
                self._trace.request(self._arrived, "b", {"prompt_tokens": len(request.prompt)})
            self._arrived += 1
            self._send(sequence)
        return ticket

    def _send(self, news: Sequence | None) -> None:
        """To the engine's thread; None: to look at what others have changed."""
        self._incoming.put(news)
        self.model.halt()

    def _stop_taking(self) -> None:
        """After this nothing more comes in."""
        with self._door:
            self._closing = True
            self._send(None)

    # What follows runs on the engine's thread only.

    def _run(self) -> None:
        schedule = self._schedule
        try:
            while not self._closing:
                self._receive()
                self._drop()
                schedule.admit()
                if any(sequence.prefilling for sequence in schedule.active):
                    self._prefill()
                self._decode(schedule.decodes(self._speculation.rows))
        except Exception:
            log.exception("the engine has failed")
        finally:
            self._stop_taking()
            self._receive()
            for sequence in [*schedule.active, *schedule.waiting]:
                self._end(sequence, sequence.failed(EngineError("the server is stopping")))

    def _receive(self) -> None:
        """Takes in new requests; waits for news when there is nothing to do."""
        schedule = self._schedule
        idle = schedule.idle and not self._closing
        if not idle and self._incoming.empty():
            return
        for _ in self.model.back(schedule.pages.reached) if idle else ():
            if not self._incoming.empty():
                break
        # Even requests that rest may run out of time.
        nap = NAP if schedule.active or schedule.waiting else None
        while idle or not self._incoming.empty():
            try:
                sequence = self._incoming.get(timeout=nap if idle else None)
            except Empty:
                return
            idle = False
            if sequence is not None:
                sequence.order = self._order
                schedule.add(sequence)
                self._order += 1

    def _drop(self) -> None:
        """Ends requests that nobody waits for any more, and those whose time is over."""
        now = time.monotonic()
        for sequence in [*self._schedule.active, *self._schedule.waiting]:
            if sequence.ticket.cancelled:
                self._schedule.remove(sequence)
                self._trace_end(sequence, "cancelled")
            elif sequence.deadline is not None and now > sequence.deadline:
                self._end(sequence, sequence.failed(late(sequence.request.timeout)))

    def _prefill(self) -> None:
        """A chunk of prompts."""
        parts = self._schedule.prefills(self.prefill_chunk)
        self._step([part for part in parts if part[0].pool is None], prompt=True)
        self._pool([part for part in parts if part[0].pool is not None])
        self._step(self._schedule.scored(self.prefill_chunk), prompt=True)

    def _decode(self, parts: List[tuple[Sequence, int]]) -> None:
        """One token for each sequence, and what drafts may add; or several one by one, where nothing else is
        to be done."""
        speculation = self._speculation
        ready = [sequence for sequence, _ in parts if sequence.length + 1 == len(sequence.tokens)]
        if not any(map(speculation.concerns, ready)):
            self._go_on(parts)
            return
        # This thread's own time: on a busy machine others' must not count as the price of a draft.
        rows, begun = sum(count for _, count in parts), time.thread_time()
        allotted = speculation.allot(ready, rows)
        stretched = [(sequence, self._schedule.stretch(sequence, count)) for sequence, count in allotted]
        speculation.propose([(sequence, count) for sequence, count in stretched if count > 0])
        speculation.spread(ready, rows, len(parts))
        for sequence in ready:
            self._schedule.branch(sequence)
        checked = self._step([(sequence, count + len(sequence.draft)) for sequence, count in parts])
        speculation.settle(rows, checked, time.thread_time() - begun)

    def _go_on(self, parts: List[tuple[Sequence, int]]) -> None:
        """Decoding without drafts: several steps at once, where nobody has to see the tokens between them."""
        sequences = [sequence for sequence, _ in parts]
        begun, before = time.perf_counter(), self._decode_steps
        count = self._steps_at_once(sequences)
        self._burst(sequences, count) if count > 1 else self._step(parts)
        if made := self._decode_steps - before:
            self._pace[len(parts)] = (time.perf_counter() - begun) / made

    def _steps_at_once(self, sequences: List[Sequence]) -> int:
        if any(sequence.prefilling for sequence in self._schedule.active):
            return 1
        count = min((sequence.reach for sequence in sequences), default=1)
        count = min(count, MOST_STEPS, int(TELL / self._pace.get(len(sequences), TELL)))
        if count > 1:
            self.model.halt(False)  # first: who comes after the next look halts it again
            count = count if self._incoming.empty() else 1
        for sequence in sequences if count > 1 else ():
            count = min(count, 1 + self._schedule.stretch(sequence, count - 1))
        return count

    def _burst(self, sequences: List[Sequence], count: int) -> None:
        """Up to `count` steps of decoding."""
        begun, before, failure = time.perf_counter(), [len(s.tokens) for s in sequences], None
        try:
            with self._turns:
                self._turns.may_hurry(self.model.halt)
                if any(sequence.tended for sequence in sequences):
                    multi_step.tended(self.model, sequences, count, begun + TELL)
                else:
                    multi_step.untended(self.model, sequences, count, self.tokenizer.eos)
        except Exception as error:  # whatever the library raises
            failure = error
        computed = time.perf_counter()
        made = max(len(s.tokens) - old for s, old in zip(sequences, before, strict=True))
        self._decode_steps += made
        for sequence in sequences:
            self._schedule.computed(sequence, 0)
            self._tell(sequence, sequence.tell())
            self._schedule.trim(sequence)
        if failure is not None:
            self._fail([sequence for sequence in sequences if sequence in self._schedule.active], failure)
        parts = [(sequence, made) for sequence in sequences]
        self._trace_step("decode", parts, (begun, computed, time.perf_counter()))

    def _fail(self, sequences: List[Sequence], error: Exception) -> None:
        log.exception("a step has failed", exc_info=error)
        for sequence in sequences:
            self._end(sequence, sequence.failed(EngineError(f"the model has failed: {error}")))

    def _step(self, parts: List[tuple[Sequence, int]], prompt: bool = False) -> list[Checked]:
        """Feeds each sequence that many of its tokens, its draft last, and chooses the next tokens of those
        that have all. What became of the drafts of these."""
        begun = time.perf_counter()
        ways = [sequence.ways(count) for sequence, count in parts]
        logits, tokens = self._run_model(parts, ways, prompt)
        computed, place, found = time.perf_counter(), 0, []
        self._decode_steps += not prompt and bool(parts)
        for (sequence, _), count in zip(parts if len(logits) else (), map(len, ways), strict=False):
            drafted, branched, before = len(sequence.draft), sequence.branched, sequence.accepted
            rows, chosen = logits[place : place + count], tokens[place : place + count]
            place += count
            if sequence.request.prompt_logprobs:
                sequence.scores.add(rows, sequence.length - count + 1)
            if sequence.complete:
                own = -1 - drafted - branched  # the first of its rows from which tokens are chosen
                events = sequence.next(rows[own:], chosen[own:])
                accepted = sequence.accepted - before
                found.append(
                    Checked(sequence, drafted, accepted - sequence.gained, branched, sequence.gained)
                )
                self._drafted += drafted + branched
                self._accepted += accepted
                self._schedule.prune(sequence)
                self._tell(sequence, events)
                self._schedule.trim(sequence)
        self._trace_step("prefill" if prompt else "decode", parts, (begun, computed, time.perf_counter()))
        return found

    def _pool(self, parts: List[tuple[Sequence, int]]) -> None:
        """As `_step`, for sequences whose hidden states are wanted."""
        states, _ = self._run_model(parts, None)
        ends = accumulate(count for _, count in parts)
        for (sequence, count), end in zip(parts if len(states) else (), ends, strict=False):
            if event := sequence.pooled(states[end - count : end]):
                self._tell(sequence, [event])

    def _run_model(
        self, parts: List[tuple[Sequence, int]], ways: List[List[Way]] | None, prompt: bool = True
    ) -> tuple[Floats, list[int]]:
        """Logits of a step of the model, and the tokens that are chosen from them in these `ways`, of as many
        rows of each sequence; without, the hidden states of all its rows. A failing call ends its own
        requests only; it has no rows."""
        none = np.empty((0, 0), np.float32), list[int]()
        if not parts:
            return none
        size = self.model.limits.page_size
        ends = [sequence.length + count for sequence, count in parts]
        given = [
            ((s.tokens[s.length : end] + s.draft)[:count], end, s.pages[: -(-end // size)])
            for (s, count), end in zip(parts, ends, strict=True)
        ]
        step = Step.of(given, None if ways is None else list(map(len, ways)), prompt)
        if any(sequence.branches for sequence, _ in parts):
            step = fanned([sequence for sequence, _ in parts], given, size)
        try:
            with self._turns:
                if ways is not None:
                    rows = list(chain.from_iterable(ways)), masks_of([s for s, _ in parts], ways)
                    found, tokens = self.model.step(step, *rows)
                else:
                    found, tokens = self.model.states(step), []
        except Exception as error:  # whatever the library raises
            self._fail([sequence for sequence, _ in parts], error)
            return none
        if prompt:
            filled = [(s, part) for (s, _), part in zip(parts, given, strict=True) if s.prefilling]
            self._prompt_tokens += sum(len(tokens) for _, (tokens, _, _) in filled)
        for sequence, count in parts:
            self._schedule.computed(sequence, count - len(sequence.draft))
        if prompt:
            self._speculation.prefilled(filled)
        return found, tokens

    def _trace_step(
        self, kind: str, parts: List[tuple[Sequence, int]], moments: tuple[float, float, float]
    ) -> None:
        schedule, tokens = self._schedule, {sequence.order: count for sequence, count in parts}
        if self._trace is not None and parts:
            self._trace.step(kind, tokens, moments)
            counts = len(schedule.active), len(schedule.waiting), schedule.pages.available
            self._trace.counters(dict(zip(("running", "waiting", "free pages"), counts, strict=True)))

    def _trace_end(self, sequence: Sequence, why: str | None) -> None:
        if self._trace is not None:
            args = {"end": why, "cached_tokens": sequence.cached or 0, "answer_tokens": sequence.answered}
            self._trace.request(sequence.order, "e", args)

    def _tell(self, sequence: Sequence, events: List[Event]) -> None:
        for event in events:
            self._answer_tokens += event.error is None and event.tokens > 0
            if event.tokens == 1 and self._trace is not None:
                self._trace.request(sequence.order, "n")
            if event.last:
                self._end(sequence, event)
            else:
                sequence.ticket.deliver(sequence.sink, event)

    def _end(self, sequence: Sequence, event: Event) -> None:
        # What a failing model has computed is not for others.
        self._schedule.remove(sequence, forget=isinstance(event.error, EngineError))
        self._trace_end(sequence, "error" if event.error is not None else event.finish)
        sequence.ticket.deliver(sequence.sink, event)
