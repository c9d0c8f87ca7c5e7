"""The engine's inputs and outputs: requests, events, tickets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlcbuild_format.bundle import Pooling
from mlcbuild_format.errors import RequestError, ServingError

from mlcbuild_runtime.constraints.grammar import Compiled
from mlcbuild_runtime.engine.pooling import Floats
from mlcbuild_runtime.executor.sampling_params import Logprob, Sampling, Score

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    """None: as many as the context has room for. 0: the prompt is only computed."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    message: bool = False
    """The answer is a whole message, not the continuation of a text."""
    logprobs: int | None = None
    """Alternatives to report for each token; None: no log-probabilities."""
    prompt_logprobs: bool = False
    """Reports those of the prompt's tokens, too, whose pages are then not shared with other requests."""
    constraint: Compiled | None = None
    """A grammar that the answer must match."""
    shown: tuple[tuple[int, str], ...] = ()
    """(token, text) of special tokens that are part of the answer's text."""
    ignore_eos: bool = False
    """Only `max_tokens`, the context and `stop` end the answer."""
    speculate: bool = True
    """Tokens may be drafted, where the engine does so; the answer is the same."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects in the answer. They are drafted whatever the engine's settings are."""
    priority: int = 0
    """Lower goes first; equal ones are in the order of arrival."""
    pooling: Pooling | None = None
    """The answer is a vector: the prompt's hidden states, pooled in this way. None: the answer is text."""
    timeout: float | None = None
    """Seconds from submission after which the request ends with an error."""


class Event(NamedTuple):
    """One token of an answer, or the only event of a request without tokens. The last event has `finish` or
    `error`."""

    text: str = ""
    tokens: int = 0
    """Tokens of the answer so far."""
    finish: Finish | None = None
    error: ServingError | None = None
    logprob: Logprob | None = None
    alternatives: tuple[Logprob, ...] = ()
    cached: int = 0
    """Prompt tokens that were in the prefix cache."""
    prompt: tuple[Score, ...] = ()
    """Scores of the prompt's tokens from the second on, in the first event of a request with
    `prompt_logprobs`."""
    accepted: int = 0
    """Tokens of the answer so far that were drafted."""
    rejected: int = 0
    """Drafted tokens so far that were not chosen."""
    vector: Floats | None = None
    """The answer of a request with `pooling`, in its only event."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


Sink = Callable[[Event], None]
"""Called by the engine's thread; must not block."""


class Ticket:
    """The client's handle of a submitted request. Its methods may be called from any thread."""

    def __init__(self, wake: Callable[[], None], window: int | None) -> None:
        """window: events that may be delivered and not yet read; the request pauses at this number."""
        self.cancelled = False
        self.told = 0
        """Events that were delivered; counted by the engine."""
        self._read, self._wake, self._window = 0, wake, window

    def cancel(self) -> None:
        """Ends the request soon; its sink is not called again after the current step."""
        self.cancelled = True
        self._wake()

    def deliver(self, sink: Sink, event: Event) -> None:
        """Passes an event to the sink, unless the request was cancelled."""
        if self.cancelled:
            return
        self.told += 1
        try:
            sink(event)
        except Exception:  # the client's side is gone, an event loop that has ended for example
            self.cancel()

    def read(self) -> None:
        """Notes that the client has read one event."""
        rested = self.resting
        self._read += 1
        if rested:
            self._wake()

    @property
    def room(self) -> int | None:
        """Events that may be delivered before the client reads on; None: any number."""
        return None if self._window is None else self._window - (self.told - self._read)

    @property
    def resting(self) -> bool:
        """The client does not keep up, so its request is paused."""
        room = self.room
        return room is not None and room <= 0


@dataclass(frozen=True)
class State:
    running: int
    waiting: int
    free_pages: int
    """Pages that can be allocated, with those of the prefix cache that are not in use."""
    cached_pages: int
    """Pages of the prefix cache, in use or not."""
    pages: int
    prompt_tokens: int
    """Tokens prefilled since the start."""
    cached_tokens: int
    """Prompt tokens read from the prefix cache since the start."""
    answer_tokens: int
    """Tokens of answers since the start."""
    decode_steps: int
    """Decode steps since the start."""
    drafted_tokens: int
    """Drafted tokens that were verified since the start."""
    accepted_tokens: int
    """Those of them that became part of answers."""
    preemptions: int
    """Requests that were preempted since the start, each time counted."""
    alive: bool


def late(timeout: float | None) -> RequestError:
    """Returns the error of a request that is not done after `timeout` seconds."""
    return RequestError(f"not done after {timeout:g} s", code="timeout", status=504)
