"""Defines the engine's inputs and outputs: requests, the events of their answers, and tickets, by which
clients cancel or pause their requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlcbuild_format.bundle import Pooling
from mlcbuild_format.errors import RequestError, ServingError

from mlcbuild_runtime.constraints.grammar import Compiled
from mlcbuild_runtime.engine.pooling import Floats
from mlcbuild_runtime.executor.sampling_params import Logprob, Sampling, Score

Finish = Literal["stop", "length"]


class Deadline(NamedTuple):
    """The time limit of a request."""

    moment: float
    """Time, as time.monotonic returns it, in seconds, until which the request must be finished."""
    seconds: float
    """The time limit that ends at this moment, in seconds from the request's arrival; for error messages."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Returns the time limit of a request that arrives now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left(self) -> float:
        """Returns the seconds that remain until the time limit; negative once it has passed."""
        return self.moment - time.monotonic()

    def error(self) -> RequestError:
        """Returns the error (code "timeout", status 504) of a request that is not finished in time."""
        return RequestError(
            f"the request was not finished after {self.seconds:g} s: send a shorter one, or raise --timeout",
            code="timeout",
            status=504,
        )


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    """Maximum number of tokens of the answer. None: as many as fit the context; 0: the prompt is computed and
    nothing is answered.
    """
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer as end-of-sequence tokens do, whatever `ignore_eos` is."""
    message: bool = False
    """True if the answer is a whole message, whose text loses the space that some tokenizers put first; False
    if it continues the prompt's text."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported for each position of the answer,
    beside that of the answer's token (0: only that one); None: no log-probabilities are reported."""
    prompt_logprobs: bool = False
    """True if log-probabilities of the prompt's tokens are reported, too. The whole prompt is then computed:
    its pages are neither read from the prefix cache nor shared with other requests."""
    constraint: Compiled | None = None
    """The grammar that the answer must match; None: any answer is allowed."""
    shown: tuple[tuple[int, str], ...] = ()
    """Special tokens that appear in the answer's text, as pairs (token, text)."""
    ignore_eos: bool = False
    """True if end-of-sequence tokens do not end the answer, while `max_tokens`, the context, `stop` and
    `stop_tokens` still do. Has no effect on an answer with a constraint."""
    speculate: bool = True
    """True if speculative decoding may be used for this request, if the engine has it. It does not change the
    answer."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects in the answer. They are drafted even if the engine has no speculative
    decoding, but not if `speculate` is False."""
    priority: int = 0
    """The request's priority: requests with a lower number go first; equal ones go in order of arrival."""
    pooling: Pooling | None = None
    """How the prompt's hidden states are pooled into an embedding, which is the answer: "last" takes that of
    the last token, "mean" the average; None for answers of text."""
    deadline: Deadline | None = None
    """Time limit at which the request ends with an error (status 504); None: it has none."""
    continues: bool = False
    """True if the request is a later part of a client's request that the server has begun to answer. A server
    that is stopping refuses new requests, and still accepts such parts."""


class EngineTimes(NamedTuple):
    """Seconds that the engine spent on a request, independent of when its client received the tokens."""

    prompt: float
    """Seconds from the start of the request's first step on the engine to the first token of the answer."""
    answer: float
    """Seconds from the first token of the answer to the last one."""


class Event(NamedTuple):
    """An event that the engine sends for a request: one token of its answer, or the only event of a request
    whose answer has no tokens, such as an embedding. The last event has `finish` or `error`."""

    text: str = ""
    tokens: int = 0
    """Number of tokens of the answer so far, that of this event included."""
    finish: Finish | None = None
    error: ServingError | None = None
    logprob: Logprob | None = None
    alternatives: tuple[Logprob, ...] = ()
    cached: int = 0
    """Number of tokens of this request's prompt that were read from the prefix cache, not computed, when the
    request was first admitted."""
    prompt: tuple[Score, ...] = ()
    """(Log-probability, alternatives) of each token of the prompt from the second on, only in the first event
    of a request with `prompt_logprobs`; () in other events."""
    accepted: int = 0
    """Number of the answer's tokens so far that were accepted draft tokens, those on branches included."""
    rejected: int = 0
    """Number of draft tokens verified for this request so far, those on branches included, that were not
    accepted."""
    vector: Floats | None = None
    """The embedding, float32 [hidden], in the only event of a request for one; None in other events."""
    times: EngineTimes | None = None
    """Seconds that the engine spent on the prompt and on the answer, in the last event of an answer with
    tokens that ends without an error; None in other events."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


Sink = Callable[[Event], None]
"""Function that receives the events of a request. The engine's thread calls it, so it must not block. If it
raises an exception, the request is cancelled."""


class Ticket:
    """The client's handle of a submitted request. Any thread may call its methods."""

    def __init__(self, wake: Callable[[], None], window: int | None) -> None:
        """Creates the handle of a request. wake: function that makes the engine check the request. window:
        number of delivered events (tokens) that the client may leave unread, None for any number; at this
        number the request pauses."""
        self.cancelled = False
        self.delivered = 0
        """Number of events (tokens of the answer, or the end) that were delivered to the client."""
        self._read, self._wake, self._window = 0, wake, window

    def cancel(self) -> None:
        """Cancels this request. The step that runs now is the last one in which the engine computes tokens
        for it, and the client gets no further event, not even for that step."""
        self.cancelled = True
        self._wake()

    def deliver(self, sink: Sink, event: Event) -> None:
        """Passes an event (a token of the answer, or the end) to the client's function `sink`, unless the
        request was cancelled. An exception of the sink cancels the request and does not reach the caller."""
        if self.cancelled:
            return
        self.delivered += 1
        try:
            sink(event)
        except Exception:  # The receiver has gone, for example an event loop that has ended.
            self.cancel()

    def read(self) -> None:
        """Records that the client has read one event (a token of the answer, or the end) of this request. A
        request that was paused because its client read too slowly continues."""
        rested = self.resting
        self._read += 1
        if rested:
            self._wake()

    @property
    def room(self) -> int | None:
        """Returns the number of further events (tokens of the answer) that may be delivered before the client
        must read one, 0 or less if none may; None: there is no limit."""
        return None if self._window is None else self._window - (self.delivered - self._read)

    @property
    def resting(self) -> bool:
        """Returns True while the request is paused because its client does not read events fast enough."""
        room = self.room
        return room is not None and room <= 0


@dataclass(frozen=True)
class Work:
    """A snapshot of the numbers of tokens, decode steps and preemptions of an engine since its start."""

    prompt_tokens: int
    """Number of prompt tokens that the engine has computed since its start, without those read from the
    prefix cache; those computed again after a preemption count again."""
    cached_tokens: int
    """Number of prompt tokens read from the prefix cache since the engine's start; a request counts when it
    is first admitted."""
    answer_tokens: int
    decode_steps: int
    drafted_tokens: int
    """Number of draft tokens, those on branches included, that steps have verified since the engine's start,
    accepted or not."""
    accepted_tokens: int
    """Number of draft tokens, those on branches included, that were accepted into answers since the engine's
    start."""
    preemptions: int
    """Number of preemptions since the engine's start, in which a running request lost its KV cache pages to
    another and waited again; a request may be preempted several times."""


@dataclass(frozen=True)
class State(Work):
    """A snapshot of an engine: its current numbers of requests and pages, and its work since its start."""

    running: int
    waiting: int
    free_pages: int
    """Number of KV cache pages that can be allocated, including idle ones of the prefix cache."""
    cached_pages: int
    """Number of KV cache pages in the prefix cache, idle or in use."""
    pages: int
    alive: bool
