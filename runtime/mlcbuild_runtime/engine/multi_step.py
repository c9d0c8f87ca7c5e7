"""Executes several decode steps before any client receives a token.

Reading all weights evicts everything else from the caches, so work between two steps runs with cold caches
and should be small. If the device can sample all tokens by itself, the steps are one call; if sequences have
constraints, each token decides the input of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List

from mlcbuild_runtime.engine.sequence import Sequence, SequenceRows, masks_of
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow


def unguided(executor: Executor, sequences: List[Sequence], count: int) -> None:
    """Executes up to `count` decode steps of sequences in one device call, and appends the sampled tokens to
    the sequences. There are fewer after an interrupt of the executor, or if the device prefers so, and none
    after a step that samples an end-of-sequence token (if it ends the answer) or invalid logits; other ends
    of answers, such as stop strings, are noticed only on delivery. An exception of the device reaches the
    caller, and then no token is appended. Each sequence must have KV cache pages for these steps, and exactly
    one token that is not in the KV cache."""
    random_numbers = list(zip(*(sequence.random_numbers(count - 1) for sequence in sequences), strict=True))
    stops_at_eos = [not sequence.request.ignore_eos for sequence in sequences]
    following = FollowingSteps(random_numbers, stops_at_eos, sequences[0].client.eos)
    for tokens in executor.steps(_step(sequences), _params(sequences), following):
        _advance(sequences, StepOutput(tokens, _no_logits))


def guided(executor: Executor, sequences: List[Sequence], count: int, until: float) -> None:
    """Executes up to `count` decode steps of sequences, some of which have constraints, and appends the
    sampled tokens to the sequences. Between two steps the constraints compute masks for the next one. No
    further step begins after `until`, a time of time.perf_counter in seconds, after an interrupt of the
    executor, once a sequence has ended or failed, or when a constraint forces tokens. An exception of the
    device reaches the caller; tokens of earlier steps remain. Each sequence must have KV cache pages for
    these steps, and exactly one token that is not in the KV cache."""
    params = _params(sequences)
    masks = masks_of(sequences, [1] * len(sequences))
    steps = executor.guided_steps(_step(sequences), params, masks, count)
    result = next(steps)
    for _ in range(count - 1):
        continues = _advance(sequences, result)
        if not continues or executor.interrupted or time.perf_counter() > until:
            return
        inputs = [following for sequence in sequences if (following := sequence.next_input()) is not None]
        if len(inputs) < len(sequences):  # Their tokens must be delivered first.
            return
        result = steps.send(inputs)
    _advance(sequences, result)


def _no_logits() -> Floats:
    raise AssertionError("the device has drawn the token")


def _step(sequences: List[Sequence]) -> ModelStep:
    return ModelStep.of([(s.tokens[-1:], s.length + 1, s.pages) for s in sequences], prompt=False)


def _params(sequences: List[Sequence]) -> list[SamplingRow]:
    return [row for sequence in sequences for row in sequence.sampling_params(1)]


def _advance(sequences: List[Sequence], result: StepOutput) -> bool:
    """Appends the token that a decode step has sampled for each sequence to that sequence. Returns False if a
    sequence has ended or failed, so that no step may follow before the client receives the tokens."""
    continuing = [s.advance(SequenceRows(result, row, row + 1)) for row, s in enumerate(sequences)]
    return all(continuing)  # This follows only once each sequence has its token.
