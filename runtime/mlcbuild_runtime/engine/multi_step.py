"""Several steps of decoding, one after the other, before anybody is told of the first.

All that is done between two steps finds its code and data in no cache, after the weights of a model have gone
through them: the less there is, the better. Where the library chooses all tokens by itself it is one call;
where sequences follow constraints, what a token means for the next one is seen to after each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as List
from itertools import chain

from mlcbuild_runtime.devices.cpu import Model
from mlcbuild_runtime.engine.sequence import Sequence, masks_of
from mlcbuild_runtime.executor.batch import Onward, Step
from mlcbuild_runtime.executor.sampling_params import Floats, Way


def untended(model: Model, sequences: List[Sequence], count: int, ends: Collection[int]) -> None:
    """Up to `count` steps in which every sequence takes the token that the library has chosen. They have
    pages for these, and one token to feed."""
    numbers = list(zip(*(sequence.numbers(count - 1) for sequence in sequences), strict=True))
    heeds = [not sequence.request.ignore_eos for sequence in sequences]
    ways = list(chain.from_iterable(_ways(sequences)))
    for tokens in model.steps(_step(sequences), ways, Onward(numbers, heeds, ends)):
        _take(sequences, tokens, _unseen)


def tended(model: Model, sequences: List[Sequence], count: int, until: float) -> None:
    """As `untended`, where each token decides what may follow it. No step begins after `until`, a time of
    time.perf_counter."""
    ways = _ways(sequences)
    steps = model.tended(_step(sequences), [way for (way,) in ways], masks_of(sequences, ways), count)
    rows, tokens = next(steps)
    for _ in range(count - 1):
        if not _take(sequences, tokens, rows) or model.halted or time.perf_counter() > until:
            return
        further = [found for sequence in sequences if (found := sequence.further()) is not None]
        if len(further) < len(sequences):  # what is wrong is told after a step of its own
            return
        rows, tokens = steps.send(further)
    _take(sequences, tokens, rows)


def _unseen() -> Floats:
    raise AssertionError("the library has chosen")


def _step(sequences: List[Sequence]) -> Step:
    return Step.of([(s.tokens[-1:], s.length + 1, s.pages) for s in sequences], prompt=False)


def _ways(sequences: List[Sequence]) -> list[list[Way]]:
    return [sequence.ways(1) for sequence in sequences]


def _take(sequences: List[Sequence], tokens: List[int], rows: Callable[[], Floats]) -> bool:
    going = [s.take(token, rows, row) for row, (s, token) in enumerate(zip(sequences, tokens, strict=True))]
    return all(going)  # after all have taken theirs
