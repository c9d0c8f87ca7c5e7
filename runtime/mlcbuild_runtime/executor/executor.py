"""The interface between the engine and a device: what a loaded bundle can compute.

The engine forms batches and knows no device; a device computes steps and knows no requests. `loading.load`
returns the executor for a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from mlcbuild_format import bundle
from mlcbuild_format.bundle import Manifest

from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, ModelStep, NextInput
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, SamplingRow


class StepOutput(NamedTuple):
    """The sampled tokens and the logits of one step of the model."""

    tokens: list[int]
    """The token sampled from each row of logits that the step computed, in order; -2 for a row from which no
    token was to be sampled, -1 for a row in which a logit is NaN or the largest one is infinite."""
    logits: Callable[[], Floats]
    """Function that returns the masked logits, float32 [rows, vocabulary]. It must be called before the
    executor's next step; a device copies logits to the host only for this call. Later steps do not change the
    array; a second call may return the same one.
    """


GuidedSteps = Generator[StepOutput, Sequence[NextInput], None]


class Executor(Protocol):
    """A bundle that is loaded on a device: the interface of CPUs and GPUs. One thread only may call its
    methods, that of the engine while one runs; `interrupt` may be called from any thread.

    Methods may raise any exception: a step that raises one leaves the KV cache of its own sequences
    undefined, and of no others."""

    @property
    def path(self) -> Path:
        """Returns the directory of the bundle that the executor runs."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def description(self) -> str:
        """Returns a short description of the device for log lines, such as "threads 4"."""

    @property
    def pages(self) -> int:
        """Returns the number of pages in the KV cache, of `manifest.limits.page_size` tokens each; pages
        count from 0."""

    @property
    def burst(self) -> int:
        """Returns the maximum number of decode steps in one call of the methods `steps` and `guided_steps`; 1
        for a device without a decode loop."""

    @property
    def exact_rows(self) -> int:
        """Returns the maximum number of rows of a decode step for which each row of logits has the same bits
        as in a step that computes it alone. Verifying drafts with more rows could change answers."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Returns the names of the library's capabilities, such as "decode_loop";
        abi.CAPABILITIES lists all."""

    def step(self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepOutput:
        """Computes a step of the model: writes the keys and values of its tokens to the KV cache, computes
        logits and samples tokens. Returns the tokens and the logits.

        sampling_params: one entry for each row of `step.rows`, of which there is at least one; SKIP for a row
        from which no token is sampled. masks: (index of a row, int32 words with one bit per token, 1 if it is
        allowed) of each row with a logit mask; the logits of the tokens that it excludes become minus
        infinity."""

    def steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        """Executes a decode step and steps that follow it, up to `burst` in all. Returns one list for each
        executed step, with the token of each sequence. following: random numbers and end-of-sequence tokens
        for the steps that follow.

        At least one step is executed. There may be fewer than requested: when a sequence ends, when a logit
        is NaN or the largest one infinite (the token is then -1), after a call of the method `interrupt`, or
        if the device prefers so.
        """

    def guided_steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks, count: int
    ) -> GuidedSteps:
        """Yields the tokens and logits of up to `count` decode steps, the first of which is `step`. After
        each, the caller sends a list with the next token, random number and logit mask of every sequence, or
        closes the generator. All sampling parameters except the random number stay the same. masks: those of
        the first step."""

    def hidden_states(self, step: ModelStep) -> Floats:
        """Computes a step without logits: writes the keys and values of its tokens to the KV cache, and
        returns their hidden states after the last norm, float32 [tokens, hidden]. Requires the capability
        "hidden_states"."""

    def sample(self, logits: Floats, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> list[int]:
        """Returns one token sampled from each row of logits, float32 [rows, any size], or -1 for a row in
        which a logit is NaN or the largest one is infinite; the array may be modified. A row's token depends
        only on the row, its parameters and its mask."""

    def interrupt(self) -> None:
        """Makes a running loop of decode steps (the method `steps`) return after its current step. Until the
        method `resume` is called, later loops return after one step, too. Any thread may call it."""

    def resume(self) -> None:
        """Lets loops of decode steps (the method `steps`) execute several steps again, after the method
        `interrupt` has limited them to one."""

    @property
    def interrupted(self) -> bool: ...

    def prepare_pages(self, used: int) -> Iterator[None]:
        """Allocates memory for further pages of the KV cache, in small parts, while the engine is idle;
        yields after each part. The device decides for how many pages; a GPU has memory for all from the
        beginning. The caller stops iterating when it has work. used: number of pages that have ever been in
        use, which are the first ones."""

    def seconds(self) -> float:
        """Returns the reading of a clock, in seconds, for the calling thread: the difference of two readings
        is the cost of the steps that it executes between them. On CPUs it is the thread's CPU time, to which
        other processes do not add; on GPUs it is wall time, to which they and any waiting do."""

    def close(self) -> None:
        """Frees the device's memory. No method may be called afterwards."""


def next_step(step: ModelStep, tokens: Sequence[int]) -> ModelStep:
    """Returns the input of the decode step after `step`, which is a decode step with one token of each
    sequence, and whose pages have room for one more; `step` does not change. tokens: the new token of each
    sequence; a negative one, which stands for no token, counts as 0."""
    return step._replace(
        tokens=[max(0, token) for token in tokens], lengths=[length + 1 for length in step.lengths]
    )


def guided_by_step(
    executor: Executor, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks
) -> GuidedSteps:
    """Executes decode steps one after another with the executor's method `step`, for devices without a faster
    implementation, until the caller closes the generator. The first one computes `step`. Yields the output
    (tokens and logits) of each; the caller then sends a list with the next token, random number and logit
    mask of every sequence."""
    params = list(sampling_params)
    while True:
        inputs = yield executor.step(step, params, masks)
        step = next_step(step, [following.token for following in inputs])
        params = [(*row[:-1], following.random_number) for row, following in zip(params, inputs, strict=True)]
        masks = [(row, following.mask) for row, following in enumerate(inputs) if following.mask is not None]


def forward(executor: Executor, step: ModelStep) -> Floats:
    """Computes a step of the model without sampling tokens: writes the keys and values of its tokens to the
    KV cache, and returns the logits of its rows, float32 [rows, vocabulary]."""
    return executor.step(step, [SKIP] * len(step.rows)).logits()


def score(executor: Executor, tokens: Sequence[int], chunk: int | None = None) -> Floats:
    """Returns the logits of every position of one sequence, float32 [len(tokens), vocabulary]. Raises
    ValueError if there is no token, if there are more than the context or the KV cache holds, or if one is
    outside the vocabulary.

    chunk: number of tokens computed in one call (default, and at most: the library's limit); 1 uses the
    kernels of decoding. The call overwrites the first pages of the KV cache, so no engine may use the
    executor at the same time.
    """
    bundle.check_tokens(tokens, executor.manifest)
    limits = executor.manifest.limits
    if not 0 < len(tokens) <= min(limits.context_window, executor.pages * limits.page_size):
        raise ValueError(f"{len(tokens)} tokens do not fit a context of {limits.context_window}")
    size = min(chunk or limits.prefill_chunk, limits.prefill_chunk)
    return np.concatenate(list(_score_chunks(executor, tokens, size)))


def _score_chunks(executor: Executor, tokens: Sequence[int], size: int) -> Iterator[Floats]:
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        end = start + len(chunk)
        pages = range(-(-end // executor.manifest.limits.page_size))
        yield forward(executor, ModelStep.of([(chunk, end, pages)], [len(chunk)])).copy()
