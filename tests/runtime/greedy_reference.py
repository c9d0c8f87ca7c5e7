"""Greedy answers of a model, computed for one sequence alone and without the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.sampling_params import SamplingRow

_GREEDY: SamplingRow = (0.0, 0.0, 1.0, 0.0, 0.0)
_FEW = 4
"""Number of tokens behind a shared beginning that are computed one by one instead of as a prompt."""


class GreedyReference:
    """An executor of a bundle that answers one prompt after the other, each in the first pages of the KV
    cache."""

    def __init__(self, bundle: Path) -> None:
        self._executor = loading.load(bundle)
        self._cached: list[int] = []
        """Tokens whose keys and values are in the KV cache."""
        self._next: dict[tuple[int, ...], int] = {}
        """Sequence -> the most likely token after it."""
        self._lock = threading.Lock()

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns the `count` most likely tokens after a prompt, each given those before it."""
        with self._lock:
            tokens = list(prompt)
            for _ in range(count):
                key = tuple(tokens)
                if key not in self._next:
                    self._next[key] = self._following(tokens)
                tokens.append(self._next[key])
            return tokens[len(prompt) :]

    def _following(self, tokens: list[int]) -> int:
        pairs = zip(tokens[:-1], self._cached, strict=False)
        least = min(len(tokens) - 1, len(self._cached))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), least)
        limits = self._executor.manifest.limits
        size = 1 if len(tokens) - shared <= _FEW else limits.prefill_chunk
        if size > 1:
            shared = 0
        sampled = list[int]()
        for first in range(shared, len(tokens), size):
            part = tokens[first : first + size]
            pages = list(range(-(-(first + len(part)) // limits.page_size)))
            step = ModelStep.of([(part, first + len(part), pages)], prompt=size > 1)
            sampled = self._executor.step(step, [_GREEDY]).tokens
        self._cached = list(tokens)
        return sampled[0]
