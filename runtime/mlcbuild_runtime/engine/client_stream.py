"""The client's side of a sequence: its ticket, and the text made of its tokens."""

from __future__ import annotations

import time

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.engine.request import Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.text.tokenizer import Tokenizer


class ClientStream:
    """Turns the tokens of one answer into text, and decides where the answer ends."""

    def __init__(
        self, request: Request, sink: Sink, ticket: Ticket, tokenizer: Tokenizer, ignore_eos: bool
    ) -> None:
        """`ignore_eos`: end-of-sequence tokens do not end the answer."""
        self.ticket, self.eos = ticket, tokenizer.eos
        self._ends = frozenset[int]() if ignore_eos else tokenizer.eos
        self.deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self.unsent = 0
        """Number of tokens at the end of the answer whose events are not delivered yet."""
        self.error: ServingError | None = None
        """The error that ends the answer after the unsent tokens, if any."""
        self._max_tokens, self._sink = request.max_tokens or 0, sink
        self._text = tokenizer.stream(request.stop, request.message, dict(request.shown))

    def deliver(self, event: Event) -> None:
        self.ticket.deliver(self._sink, event)

    def text(self, token: int, position: int, done: bool) -> tuple[str, Finish | None]:
        """Returns the text that a token adds to the answer, and the finish reason if the answer ends with it.

        `position` is the token's index in the answer. `done` is true if the constraint allows nothing after
        it.
        """
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
