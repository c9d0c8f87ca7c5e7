"""What goes into the engine and what comes out of it."""

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
    """Alternatives to report for each token; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Report those of the prompt's tokens, too. Nothing of it is shared with other requests then."""
    constraint: Compiled | None = None
    """What the answer must be."""
    shown: tuple[tuple[int, str], ...] = ()
    """Special tokens that are part of the text, and how they are written."""
    ignore_eos: bool = False
    """Only `max_tokens`, the context and `stop` end the answer."""
    speculate: bool = True
    """Draft tokens, where the engine does; the answer is the same."""
    prediction: tuple[int, ...] = ()
    """Tokens that the answer is expected to have: drafted, whatever the engine drafts otherwise."""
    priority: int = 0
    """Lower is sooner; the same is in order of arrival."""
    pooling: Pooling | None = None
    """The answer is not text but a vector: the prompt's hidden states, pooled in this way."""
    timeout: float | None = None
    """Seconds from submission after which the request ends with an error."""


class Event(NamedTuple):
    """News of one request, once for every token, or once where there is to be none. The last one has `finish`
    or `error`."""

    text: str = ""
    tokens: int = 0
    """Tokens of the answer so far."""
    finish: Finish | None = None
    error: ServingError | None = None
    logprob: Logprob | None = None
    alternatives: tuple[Logprob, ...] = ()
    cached: int = 0
    """Tokens of the prompt whose keys and values another request had left in the cache."""
    prompt: tuple[Score, ...] = ()
    """Of the prompt's tokens from the second on, in the first event of a request with `prompt_logprobs`."""
    accepted: int = 0
    """Tokens of the answer so far that were drafted."""
    rejected: int = 0
    """Drafted tokens so far that were not chosen."""
    vector: Floats | None = None
    """Of a request with `pooling`, in its only event."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


Sink = Callable[[Event], None]
"""Called by the engine's thread; must not block."""


class Ticket:
    """A request on its way. Its methods may be called from any thread."""

    def __init__(self, wake: Callable[[], None], window: int | None) -> None:
        """`window`: events that may be told and not yet read; the request rests when there are so many."""
        self.cancelled = False
        self.told = 0
        """Events so far; counted by the engine."""
        self._read, self._wake, self._window = 0, wake, window

    def cancel(self) -> None:
        """Ends the request soon; its sink is not called again after the current step."""
        self.cancelled = True
        self._wake()

    def deliver(self, sink: Sink, event: Event) -> None:
        """Tells an event, unless nobody waits for it any more."""
        if self.cancelled:
            return
        self.told += 1
        try:
            sink(event)
        except Exception:  # the client's side is gone, an event loop that has ended for example
            self.cancel()

    def read(self) -> None:
        """One event has gone to the client."""
        rested = self.resting
        self._read += 1
        if rested:
            self._wake()

    @property
    def room(self) -> int | None:
        """Events that may be told before the client reads on; None: any number."""
        return None if self._window is None else self._window - (self.told - self._read)

    @property
    def resting(self) -> bool:
        """The client does not keep up, so its request waits for it."""
        room = self.room
        return room is not None and room <= 0


@dataclass(frozen=True)
class State:
    running: int
    waiting: int
    free_pages: int
    """Pages that can be had, those of the prefix cache included."""
    cached_pages: int
    """Pages of the prefix cache, in use or not."""
    pages: int
    prompt_tokens: int
    """Tokens prefilled since the start."""
    cached_tokens: int
    """Tokens of prompts that the prefix cache has spared since the start."""
    answer_tokens: int
    """Tokens made since the start."""
    decode_steps: int
    """Steps since the start that took one token of each running request, and its draft."""
    drafted_tokens: int
    """Tokens that were drafted and checked since the start."""
    accepted_tokens: int
    """Those of them that became part of answers."""
    preemptions: int
    """Times since the start that a request had to give up its pages and compute them again."""
    alive: bool


def late(timeout: float | None) -> RequestError:
    """Returns the error of a request that is not done after `timeout` seconds."""
    return RequestError(f"not done after {timeout:g} s", code="timeout", status=504)
