"""Measures a bundle of mlcbuild as one of the compared engines, through the runtime that serves bundles."""

from __future__ import annotations

from child import CONTEXT, SEQUENCES, clock, prompt, run, since
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.executor.batch import ModelStep

PAGES = CONTEXT // 16 + 16
"""Number of KV cache pages, of 16 tokens each, for each sequence of a measurement: enough for its CONTEXT
tokens and 256 decode steps.
"""


class Ours:
    def __init__(self, path: str, threads: int, vocabulary: int) -> None:
        self.model = CpuExecutor.load(path, threads=threads, pages=PAGES * SEQUENCES)
        self.vocabulary = vocabulary
        self.filled = 0

    def _pages(self, sequence: int) -> range:
        return range(sequence * PAGES, (sequence + 1) * PAGES)

    def prefill(self, tokens: list[int]) -> None:
        self._fill(tokens, self._pages(0))
        self.filled = 0

    def _fill(self, tokens: list[int], pages: range) -> None:
        size = self.model.limits.prefill_chunk
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            end = start + len(part)
            self.model.forward(ModelStep.of([(part, end, pages[: -(-end // 16)])]))

    def decode(self, batch: int, steps: int) -> list[tuple[float, float]]:
        for sequence in range(self.filled, batch):
            self._fill(prompt(CONTEXT, self.vocabulary, sequence), self._pages(sequence))
        self.filled = max(self.filled, batch)
        samples = []
        for step in range(steps):
            length = CONTEXT + step + 1
            start = clock()
            parts = [([500 + step], length, self._pages(s)[: -(-length // 16)]) for s in range(batch)]
            self.model.forward(ModelStep.of(parts)).argmax(axis=-1)
            samples.append(since(start))
        return samples

    def save_logits(self, tokens: list[int], path: str) -> None:
        self.model.score(tokens).tofile(path)
        self.filled = 0


run(Ours)
