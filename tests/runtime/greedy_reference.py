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
    """An executor of a bundle that answers one prompt after the other. The KV cache keeps the latest
    sequences, each in pages of its own."""

    def __init__(self, bundle: Path) -> None:
        self._executor = loading.load(bundle)
        self._limits = self._executor.manifest.limits
        self._slots: list[list[int]] = [
            [] for _ in range(self._executor.pages // self._limits.sequence_pages)
        ]
        """Tokens whose keys and values are in each part of the KV cache."""
        self._recent = list(range(len(self._slots)))
        """Indices of the parts, the most recently used one last."""
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
        shared, slot = max((_shared(tokens, cached), slot) for slot, cached in enumerate(self._slots))
        size = 1
        if len(tokens) - shared > _FEW:
            size, shared, slot = self._limits.prefill_chunk, 0, self._recent[0]
        first_page, sampled = slot * self._limits.sequence_pages, list[int]()
        for first in range(shared, len(tokens), size):
            part = tokens[first : first + size]
            end = first_page + -(-(first + len(part)) // self._limits.page_size)
            parts = [(part, first + len(part), list(range(first_page, end)))]
            sampled = self._executor.step(ModelStep.of(parts, prompt=size > 1), [_GREEDY]).tokens
        self._slots[slot] = list(tokens)
        self._recent.remove(slot)
        self._recent.append(slot)
        return sampled[0]


def _shared(tokens: list[int], cached: list[int]) -> int:
    """Returns the number of first tokens of a sequence whose keys and values are cached; the last token is
    always computed again."""
    pairs = zip(tokens[:-1], cached, strict=False)
    least = min(len(tokens) - 1, len(cached))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), least)
