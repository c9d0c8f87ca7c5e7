"""The client's side of a sequence: the text made of its tokens, the times, and the ticket with which the
client cancels the request or, by leaving events unread, pauses it."""

from __future__ import annotations

import time

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.engine.request import EngineTimes, Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.text.tokenizer import Tokenizer


class Stopwatch:
    """Measures the wall time of one request in the engine: from its first step to the first token of the
    answer, and from there to the latest. Moments are those of time.perf_counter, in seconds."""

    def __init__(self) -> None:
        self._begin = self._first = self._last = 0.0

    def begin(self, moment: float) -> None:
        """Records that a step of the model with this request began at `moment`, a time of time.perf_counter
        in seconds. Only the first call counts."""
        self._begin = self._begin or moment

    def token(self) -> None:
        """Records that one more token of the answer has been computed, at the present time."""
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def times(self) -> EngineTimes | None:
        """Returns (seconds from the beginning of the request's first step to the first token of the answer,
        seconds from there to the latest token), as the engine measured them; None before the first token."""
        if not self._first:
            return None
        return EngineTimes(self._first - self._begin, self._last - self._first)


class ClientStream:
    """Turns the tokens of one answer into text, and decides where the answer ends."""

    def __init__(
        self, request: Request, sink: Sink, ticket: Ticket, tokenizer: Tokenizer, ignore_eos: bool
    ) -> None:
        """Creates the text stream and the stopwatch of one answer. request: what the client requested; sink:
        function that receives the answer's events; ticket: handle with which the client cancels or pauses the
        request; ignore_eos: True if end-of-sequence tokens do not end the answer."""
        self.ticket, self.eos = ticket, tokenizer.eos
        self._ends = (frozenset[int]() if ignore_eos else tokenizer.eos) | set(request.stop_tokens)
        self.stopwatch = Stopwatch()
        self.unsent = 0
        """Number of tokens at the end of the answer whose events are not delivered to the client yet."""
        self.error: ServingError | None = None
        """The error with which the answer ends; None without an error. Computed tokens whose events are not
        delivered to the client yet are delivered before it."""
        self._max_tokens, self._sink = request.max_tokens or 0, sink
        self._text = tokenizer.stream(request.stop, request.message, dict(request.shown))

    def deliver(self, event: Event) -> None:
        self.ticket.deliver(self._sink, event)

    def text(self, token: int, position: int, done: bool) -> tuple[str, Finish | None]:
        """Adds a token to the answer. Returns (the text that can now be delivered, which may be "" or include
        text of earlier tokens that was held back; "stop" or "length", the reason, if the answer ends with the
        token, else None). position: the token's index in the answer, counted from 0; done: True if the
        constraint allows nothing after the token."""
        if self.is_end(token):
            return self._text.finish(), "stop"
        finish: Finish | None = None
        text = self._text.push(token)
        if not self._text.stopped and position + 1 >= self._max_tokens:
            finish = "length"
            text += self._text.finish()
        if done:
            finish = "stop"
            text += self._text.finish()
        return text, "stop" if self._text.stopped else finish

    def is_end(self, token: int) -> bool:
        return token in self._ends
