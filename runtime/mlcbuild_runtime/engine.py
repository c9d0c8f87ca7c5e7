"""Requests to batches. One thread owns the model; requests come in by a queue, tokens go out to sinks.

Every turn of the loop admits what fits, runs one chunk of prefill and then one step of decoding for all
sequences that have their prompt behind them. Each call is thus all prefill or all decode, so that a
sequence takes the same kernels whatever it shares its batch with.

Pages for a request's whole length are reserved when it is admitted: decoding never runs out of them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from mlcbuild_runtime.errors import EngineError, RequestError, ServingError
from mlcbuild_runtime.sampling import Floats, Logprob, Sampling, choose, generator, logprobs
from mlcbuild_runtime.text import Tokenizer
from mlcbuild_runtime.vm import Model, Step, check_tokens

log = logging.getLogger(__name__)

Finish = Literal["stop", "length"]
MAX_WAITING = 1024
"""Requests that may wait for a place; more are turned away."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    message: bool = False
    """The answer is a whole message, not the continuation of a text."""
    logprobs: int | None = None
    """Alternatives to report for each token; None: no log-probabilities at all."""


@dataclass(frozen=True)
class Event:
    """News of one request, once for every token. The last one has `finish` or `error`."""

    text: str = ""
    tokens: int = 0
    """Tokens of the answer so far."""
    finish: Finish | None = None
    error: ServingError | None = None
    logprob: Logprob | None = None
    alternatives: tuple[Logprob, ...] = ()

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


Sink = Callable[[Event], None]
"""Called by the engine's thread; must not block."""


class Ticket:
    """A request on its way."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """Ends the request soon; its sink is not called again after the current step."""
        self.cancelled = True


@dataclass(frozen=True)
class State:
    running: int
    waiting: int
    free_pages: int
    pages: int
    prompt_tokens: int
    """Tokens prefilled since the start."""
    answer_tokens: int
    """Tokens made since the start."""
    alive: bool


class _Sequence:
    """One admitted or waiting request."""

    def __init__(self, request: Request, limit: int, sink: Sink, tokenizer: Tokenizer) -> None:
        self.request, self.limit, self.sink = request, limit, sink
        self.ticket = Ticket()
        self.tokens = list(request.prompt)
        self.length = 0
        """Tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.random = generator(request.sampling)
        self.stream = tokenizer.stream(request.stop, request.message)

    @property
    def prefilling(self) -> bool:
        return self.length < len(self.request.prompt)

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Engine:
    """Runs a model for any number of clients. `start` it, `submit` from any thread, `close` it."""

    def __init__(self, model: Model, tokenizer: Tokenizer, max_batch: int | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_batch = min(max_batch or model.limits.max_batch, model.limits.max_batch)
        self._incoming: SimpleQueue[_Sequence | None] = SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []
        self._free = list(range(model.pages - 1, -1, -1))
        self._closing, self._door = False, threading.Lock()
        self._prompt_tokens = self._answer_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        self._thread.start()
        return self

    def close(self, timeout: float = 1.0) -> bool:
        """Ends every request with an error. False when a step still runs after `timeout` seconds."""
        self._stop_taking()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def state(self) -> State:
        return State(
            running=len(self._active),
            waiting=len(self._waiting) + self._incoming.qsize(),
            free_pages=len(self._free),
            pages=self.model.pages,
            prompt_tokens=self._prompt_tokens,
            answer_tokens=self._answer_tokens,
            alive=self._thread.is_alive(),
        )

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Takes a request on. Raises RequestError when it can never be served, EngineError after the end."""
        sequence = _Sequence(request, self._answer_limit(request), sink, self.tokenizer)
        if self.state().waiting >= MAX_WAITING:
            raise RequestError(
                f"{MAX_WAITING} requests are waiting already: try later", code="overloaded", status=503
            )
        with self._door:
            if self._closing or not self._thread.is_alive():
                raise EngineError("the engine is stopped")
            self._incoming.put(sequence)
        return sequence.ticket

    def _stop_taking(self) -> None:
        """After this nothing more comes in."""
        with self._door:
            self._closing = True
            self._incoming.put(None)

    def _answer_limit(self, request: Request) -> int:
        """The most tokens the answer may have, after all checks of the request's size."""
        size, limits = len(request.prompt), self.model.limits
        context = min(limits.context_window, self.model.pages * limits.page_size)
        if not size:
            raise RequestError("the prompt has no tokens", param="prompt")
        if size >= context:
            raise RequestError(
                f"the prompt has {size} tokens, but the context has {context}, answer included: shorten it",
                code="context_length_exceeded",
            )
        wanted = request.max_tokens
        if wanted is not None and size + wanted > context:
            raise RequestError(
                f"the prompt has {size} tokens and max_tokens is {wanted}, {size + wanted} together, but the"
                f" context has {context}: ask for at most {context - size}",
                code="context_length_exceeded",
            )
        try:
            check_tokens(request.prompt, self.model.manifest)
        except ValueError as error:
            raise RequestError(f"the prompt does not fit the model: {error}", param="prompt") from None
        return context - size if wanted is None else wanted

    # What follows runs on the engine's thread only.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._receive()
                self._drop_cancelled()
                self._admit()
                self._prefill()
                self._decode()
        except Exception:
            log.exception("the engine has failed")
        finally:
            self._stop_taking()
            self._receive()
            for sequence in [*self._active, *self._waiting]:
                self._end(sequence, Event(error=EngineError("the server is stopping")))

    def _receive(self) -> None:
        """Takes in new requests; waits for one when there is nothing to do."""
        idle = not (self._active or self._waiting or self._closing)
        while idle or not self._incoming.empty():
            idle = False
            sequence = self._incoming.get()
            if sequence is not None:
                self._waiting.append(sequence)

    def _drop_cancelled(self) -> None:
        for sequence in [*self._active, *self._waiting]:
            if sequence.ticket.cancelled:
                self._release(sequence)

    def _admit(self) -> None:
        """In order of arrival: a long request is not overtaken for ever by short ones."""
        while self._waiting and len(self._active) < self.max_batch:
            first = self._waiting[0]
            # The last token of an answer is never fed back.
            length = len(first.request.prompt) + first.limit - 1
            count = -(-length // self.model.limits.page_size)
            if count > len(self._free):
                return
            first.pages = [self._free.pop() for _ in range(count)]
            self._active.append(self._waiting.popleft())

    def _prefill(self) -> None:
        room = self.model.limits.prefill_chunk
        parts: list[tuple[_Sequence, Sequence[int]]] = []
        for sequence in self._active:
            if sequence.prefilling and room:
                chunk = sequence.tokens[sequence.length : sequence.length + room]
                parts.append((sequence, chunk))
                room -= len(chunk)
        self._prompt_tokens += sum(len(chunk) for _, chunk in parts)
        self._step(parts)

    def _decode(self) -> None:
        self._step([(s, s.tokens[-1:]) for s in self._active if not s.prefilling])

    def _step(self, parts: Sequence[tuple[_Sequence, Sequence[int]]]) -> None:
        """Runs one call and hands each sequence its logits. A failing call ends its own requests only."""
        if not parts:
            return
        page_size = self.model.limits.page_size
        step = Step.of(
            [(chunk, end := s.length + len(chunk), s.pages[: -(-end // page_size)]) for s, chunk in parts]
        )
        try:
            logits = self.model.forward(step)
        except Exception as error:  # whatever the library raises
            log.exception("a step has failed")
            for sequence, _ in parts:
                self._end(sequence, Event(error=EngineError(f"the model has failed: {error}")))
            return
        for (sequence, chunk), row in zip(parts, logits, strict=True):
            sequence.length += len(chunk)
            if not sequence.prefilling:
                self._answer(sequence, row)

    def _answer(self, sequence: _Sequence, logits: Floats) -> None:
        """One more token for a sequence."""
        try:
            event = self._next(sequence, logits)
        except ServingError as error:
            event = Event(tokens=sequence.answered, error=error)
        self._answer_tokens += 1
        if event.last:
            self._end(sequence, event)
        elif not sequence.ticket.cancelled:
            self._tell(sequence, event)

    def _next(self, sequence: _Sequence, logits: Floats) -> Event:
        request = sequence.request
        token = choose(logits, request.sampling, sequence.random)
        sequence.tokens.append(token)
        logprob, alternatives = None, tuple[Logprob, ...]()
        if request.logprobs is not None:
            logprob, alternatives = logprobs(logits, token, request.logprobs)
        finish: Finish | None = None
        if token in self.tokenizer.eos:
            text, finish = sequence.stream.finish(), "stop"
        else:
            text = sequence.stream.push(token)
            if not sequence.stream.stopped and sequence.answered >= sequence.limit:
                finish = "length"
                text += sequence.stream.finish()
            if sequence.stream.stopped:
                finish = "stop"
        return Event(text, sequence.answered, finish, None, logprob, alternatives)

    def _end(self, sequence: _Sequence, event: Event) -> None:
        self._release(sequence)
        if not sequence.ticket.cancelled:
            self._tell(sequence, event)

    def _release(self, sequence: _Sequence) -> None:
        if sequence in self._active:
            self._active.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._free.extend(reversed(sequence.pages))
        sequence.pages = []

    def _tell(self, sequence: _Sequence, event: Event) -> None:
        try:
            sequence.sink(event)
        except Exception:  # the client's side is gone, an event loop that has ended for example
            sequence.ticket.cancel()
