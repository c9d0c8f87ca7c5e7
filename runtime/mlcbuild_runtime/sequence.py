"""One request on its way through the engine: its tokens, its place in the cache, its next token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as List

import numpy as np

from mlcbuild_runtime.errors import ServingError
from mlcbuild_runtime.grammar import Matcher
from mlcbuild_runtime.pages import Key
from mlcbuild_runtime.pooling import Pool
from mlcbuild_runtime.request import Event, Finish, Request, Sink, Ticket
from mlcbuild_runtime.sampling import Floats, Logprob, adjusted, choose, generator, logprobs
from mlcbuild_runtime.text import Tokenizer


class Sequence:
    """A waiting or running request. Everything that decides its tokens stays when its pages go."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        ticket: Ticket,
        tokenizer: Tokenizer,
        matcher: Matcher | None = None,
    ) -> None:
        """`request` has a max_tokens that fits the context. `matcher`: of its constraint."""
        self.request, self.sink, self.ticket = request, sink, ticket
        self.order = 0
        """Of arrival; given by the engine."""
        self.tokens = list(request.prompt)
        self.length = 0
        """Tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.cached: int | None = None
        """Tokens that the prefix cache had when it was first admitted; None before."""
        self.deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self._keys: list[Key] = []
        self._random = generator(request.sampling)
        self._stream = tokenizer.stream(request.stop, request.message)
        self._eos = tokenizer.eos
        self._counts: Counter[int] = Counter()
        self._matcher = matcher
        self.pool = None if request.pooling is None else Pool(request.pooling)

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
        if self.pool is not None and self.pool.kind == "mean":
            return []  # the cache has keys and values of a prompt, but not the states of all its tokens
        for end in range(len(self._keys) * page_size + page_size, length + 1, page_size):
            block = tuple(self.tokens[end - page_size : end])
            own = end > len(self.request.prompt)
            self._keys.append((-1 - self.order, *block) if own else block)
        return self._keys[: length // page_size]

    def next(self, logits: Floats) -> Event:
        """Chooses a token. An error is an event, too."""
        try:
            return self._next(logits)
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
        return Event(tokens=self.answered, error=error, cached=self.cached or 0)

    def _next(self, logits: Floats) -> Event:
        request = self.request
        adapted = adjusted(logits, request.sampling, request.prompt, self._counts)
        if self._matcher is not None:
            allowed = self._matcher.allowed(len(adapted))
            adapted = np.where(allowed, adapted, np.float32(-np.inf))
        token = choose(adapted, request.sampling, self._random)
        if self._matcher is not None:
            self._matcher.take(token)
        self.tokens.append(token)
        self._counts[token] += 1
        logprob, alternatives = None, tuple[Logprob, ...]()
        if request.logprobs is not None:
            logprob, alternatives = logprobs(logits, token, request.logprobs)
        text, finish = self._text(token)
        return Event(text, self.answered, finish, None, logprob, alternatives, self.cached or 0)

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
