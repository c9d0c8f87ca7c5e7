"""Helpers for tests of single modules of the engine, without its thread, a model and a real tokenizer:
sequences, rows of logits, a tokenizer of letters, and a matcher for constraints."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any, cast

import numpy as np
from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.engine.request import Event, Request, Ticket
from mlcbuild_runtime.engine.sequence import Sequence, SequenceRows
from mlcbuild_runtime.executor.batch import Masks
from mlcbuild_runtime.executor.executor import StepOutput
from mlcbuild_runtime.executor.sampling_params import Floats, Sampling, SamplingRow
from mlcbuild_runtime.text.tokenizer import Tokenizer

from .numpy_executor import NumpyExecutor

GREEDY = Sampling(temperature=0)
VOCAB = 8


class Stream:
    """A stream that converts the n-th token to the n-th letter of the alphabet."""

    stopped = False

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop

    def push(self, token: int) -> str:
        text = chr(ord("a") + token)
        self.stopped = text in self.stop
        return "" if self.stopped else text

    def finish(self) -> str:
        return "."


class Letters:
    """A tokenizer of letters, in which token 7 is the end-of-sequence token."""

    eos = frozenset({7})

    def stream(self, stop: tuple[str, ...], message: bool, shown: object) -> Stream:
        return Stream(stop)


class Words:
    """A constraint's matcher that allows exactly one sequence of tokens."""

    def __init__(self, tokens: List[int]) -> None:
        self.left = list(tokens)
        self.free = self.forces = False

    @property
    def finished(self) -> bool:
        return not self.left

    def take(self, token: int) -> None:
        assert token == self.left.pop(0)

    def tries(self, token: int) -> bool:
        return bool(self.left) and token == self.left[0]

    def mask(self) -> Any:
        return np.array([1 << self.left[0]], np.int32)

    def forced(self, count: int) -> list[int]:
        return self.left[:count] if self.forces else []

    def accepted(self, draft: list[int]) -> int:
        pairs = zip(draft, self.left, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(self.left)))

    def after(self, draft: list[int]) -> Words:
        return Words(self.left[len(draft) :])


def sample(logits: Floats, params: List[SamplingRow], masks: Masks = ()) -> list[int]:
    return NumpyExecutor.sample(cast(NumpyExecutor, None), logits, params, masks)


def sequence(
    request: Request, matcher: Words | None = None, window: int | None = None
) -> tuple[Sequence, list[Event]]:
    """Returns a sequence, and the list to which its client appends events."""
    events: list[Event] = []
    ticket = Ticket(lambda: None, window)
    seq = Sequence(
        request, events.append, ticket, cast(Tokenizer, Letters()), sample, cast("Matcher | None", matcher)
    )
    return seq, events


def logits_of(*likely: int) -> Floats:
    """Returns one row of logits for each token of `likely`, in which that token is the most likely one."""
    rows = np.zeros((len(likely), VOCAB), np.float32)
    rows[np.arange(len(likely)), likely] = 5
    return rows


def rows(seq: Sequence, logits: Floats, count: int = 1) -> SequenceRows:
    """Returns the rows of logits of one sequence as a step of the model would, with tokens sampled from
    `logits`. count: number of the sequence's last tokens that are new in this step, draft tokens not
    included. The sequence's length grows by `count`."""
    seq.length = len(seq.tokens) - count
    params = seq.sampling_params(count + len(seq.draft.tokens))
    masks = [] if seq.mask is None else [(len(params) - 1 - seq.draft.size, seq.mask)]
    result = StepOutput(sample(logits, params, masks), lambda: logits)
    seq.length += count
    return SequenceRows(result, 0, len(params))
