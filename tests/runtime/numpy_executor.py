"""A device in NumPy for tests: it executes the toy model of toy.py, which has a trivial formula, with a paged
KV cache, and implements the interface Executor as another package could.

The compiled library is replaced by the file `model.json`, which states the vocabulary's size. The model is
computed in exact integers, and tokens are sampled in float64 as abi.SamplingParams defines it, so that the
engine's tests compare two implementations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.bundle import Manifest
from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, ModelStep
from mlcbuild_runtime.executor.executor import GuidedSteps, StepOutput, guided_by_step, next_step
from mlcbuild_runtime.executor.loading import Loader
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow
from numpy.typing import NDArray

SECONDS = 1e-4
"""Seconds by which the simulated clock of this device advances for each row (token) that it computes."""


def load(path: Path, manifest: Manifest, threads: int | None, pages: int | None) -> NumpyExecutor:
    limits = manifest.limits
    everything = limits.max_batch * -(-limits.context_window // limits.page_size)
    return NumpyExecutor(path, manifest, pages or everything)


class NumpyExecutor:
    """An executor that computes a trivial model in NumPy. After tokens t_0 .. t_p the logit of token v is
    -((v - sum(t_j * (j mod 7 + 1))) mod vocabulary) / 2, with j = 0 .. p."""

    burst, exact_rows = 8, 16
    capabilities = frozenset(abi.CAPABILITIES)
    description = "numpy"

    def __init__(self, path: Path, manifest: Manifest, pages: int) -> None:
        self.path, self.manifest, self.pages = path, manifest, pages
        self.vocab_size: int = json.loads((path / manifest.library).read_text())["vocab_size"]
        self.cache: NDArray[np.int64] = np.full((pages, manifest.limits.page_size), -1)
        self.rows_computed, self.interrupted, self.prepared = 0, False, 0

    def step(self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepOutput:
        totals = self._totals(step)[step.rows]
        logits = self._logits(totals)
        tokens = self.sample(logits, sampling_params, masks)
        return StepOutput(tokens, lambda: logits)

    def steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        tokens_by_step, params = list[list[int]](), list(sampling_params)
        for random_numbers in [*following.random_numbers, None]:
            tokens_by_step.append(self.step(step, params).tokens)
            ended = [
                token < 0 or (stops and token in following.eos_tokens)
                for token, stops in zip(tokens_by_step[-1], following.stops_at_eos, strict=True)
            ]
            if random_numbers is None or any(ended) or self.interrupted:
                break
            step = next_step(step, tokens_by_step[-1])
            params = [
                (*row_params[:-1], number) for row_params, number in zip(params, random_numbers, strict=True)
            ]
        return tokens_by_step

    def guided_steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks, count: int
    ) -> GuidedSteps:
        return guided_by_step(self, step, sampling_params, masks)

    def hidden_states(self, step: ModelStep) -> Floats:
        totals = self._totals(step)
        return np.stack([totals, totals % 7, np.ones_like(totals)], axis=1).astype(np.float32)

    def sample(self, logits: Floats, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> list[int]:
        for row, mask in masks:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[row, bits == 0] = -np.inf
        return [
            draw(row, abi.SamplingParams(*row_params))
            for row, row_params in zip(logits, sampling_params, strict=True)
        ]

    def interrupt(self) -> None:
        self.interrupted = True

    def resume(self) -> None:
        self.interrupted = False

    def prepare_pages(self, used: int) -> Iterator[None]:
        self.prepared = max(self.prepared, min(2 * used, self.pages))
        yield

    def seconds(self) -> float:
        return self.rows_computed * SECONDS

    def close(self) -> None:
        del self.cache

    def _totals(self, step: ModelStep) -> NDArray[np.int64]:
        """Writes the new tokens of a step to the KV cache, and returns for each of them the sum over the
        tokens of its sequence up to itself, each times (position mod 7) + 1."""
        size, totals = self.manifest.limits.page_size, list[NDArray[np.int64]]()
        positions, slots = step.places(size)
        self.cache.ravel()[slots] = step.tokens
        for source, target, count in step.forks:
            self.cache[target, :count] = self.cache[source, :count]
        self.rows_computed += len(step.tokens)
        for s in range(len(step.lengths)):
            pages = step.page_table[step.page_indptr[s] : step.page_indptr[s + 1]]
            text = self.cache[pages].ravel()
            sums = np.cumsum(text * (np.arange(len(text)) % 7 + 1))
            totals.append(sums[positions[step.indptr[s] : step.indptr[s + 1]]])
        return np.concatenate(totals)

    def _logits(self, totals: NDArray[np.int64]) -> Floats:
        distance = (np.arange(self.vocab_size) - totals[:, None]) % self.vocab_size
        return (distance * -0.5).astype(np.float32)


def draw(logits: Floats, params: abi.SamplingParams) -> int:
    """Returns a token sampled from a row of logits as abi.SamplingParams defines it; the filters apply in the
    order top_k, min_p, top_p."""
    if params.inverse_temperature < 0:
        return abi.NO_TOKEN
    if not np.isfinite(logits.max()):
        return abi.INVALID_TOKEN
    best = int(logits.argmax())
    if params.inverse_temperature == 0:
        return best
    below = logits.astype(np.float64) - logits[best]
    allowed = below >= params.logit_drop
    if 0 < params.top_k < len(below):
        allowed &= below >= np.sort(below)[-int(params.top_k)]
    weights = np.where(allowed, np.exp(below * params.inverse_temperature), 0.0)
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        kept = np.searchsorted(np.cumsum(weights[order]), params.top_p * weights.sum()) + 1
        weights[weights < weights[order[min(kept, len(order)) - 1]]] = 0.0
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, params.random * sums[-1], side="right"))


if TYPE_CHECKING:  # mypy checks here that the class implements the protocol
    _: Loader = load
