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
"""Maximum number of tokens that are computed one by one, as in decoding, behind a beginning that is in the KV
cache. If more are missing, the whole sequence is computed as a prompt."""


class GreedyReference:
    """The greedy answers of a bundle's model that tests expect, computed with its executor for one prompt at
    a time and without the engine. The KV cache keeps the latest sequences, each in pages of its own, so that
    similar prompts are computed faster."""

    def __init__(self, bundle: Path) -> None:
        self._executor = loading.load(bundle)
        self._limits = self._executor.manifest.limits
        self._slots: list[list[int]] = [
            [] for _ in range(self._executor.pages // self._limits.sequence_pages)
        ]
        """The tokens whose keys and values are in the KV cache, one list for each part of the cache. A part
        has room for one sequence."""
        self._recent = list(range(len(self._slots)))
        """Indices of the parts of the KV cache, each of which holds one sequence, the most recently used one
        last."""
        self._next: dict[tuple[int, ...], int] = {}
        """Memory of earlier results: all tokens of a sequence -> the most likely token after them."""
        self._lock = threading.Lock()

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns the `count` tokens that follow a prompt in greedy decoding: each is the most likely one
        after the prompt and the tokens before it."""
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
