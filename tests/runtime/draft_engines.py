"""Engines for tests whose draft tokens are right, wrong, or partly right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_runtime.devices.cpu import EXACT_ROWS
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.speculation import Speculation
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer

Guess = Callable[[Sequence, int], list[int]]


class Drafting(Speculation):
    """A replacement for speculative decoding whose draft tokens come from the function `guess`. It drafts for
    every sequence in every step, regardless of how many draft tokens are accepted."""

    def __init__(self, guess: Guess) -> None:
        super().__init__(7, EXACT_ROWS)
        self._guess = guess
        self._prices.best = lambda batch, most: most  # type: ignore[method-assign]

    def allot(self, sequences: Any, batch: int) -> list[tuple[Sequence, int]]:
        for sequence in sequences:
            sequence.draft.credit.balance, sequence.draft.credit.length = 5.0, 7
        return super().allot(sequences, batch)

    def propose(self, parts: Any) -> None:
        for sequence, count in parts:
            sequence.draft.tokens = sequence.allowed(self._guess(sequence, count)[:count])


def start(bundle: Path, guess: Guess | None, eos: bool = False, **options: Any) -> Engine:
    executor = loading.load(bundle, pages=options.pop("pages", None))
    tokenizer = Tokenizer.load(bundle, executor.manifest.serving)
    if not eos:
        tokenizer.eos = frozenset()
    engine = Engine(executor, tokenizer, EngineOptions(**options))
    if guess is not None:
        engine._runner.speculation = Drafting(guess)
    return engine.start()


@cache
def loaded(bundle: Path) -> Executor:
    """Returns an executor of a bundle that several tests share."""
    return loading.load(bundle)


TEXT = "one two three four five six seven. one two three four five six seven. one two three"


@pytest.fixture(scope="module")
def plain(toy_bundle: Path) -> Iterator[Engine]:
    engine = start(toy_bundle, None)
    yield engine
    assert engine.close()
