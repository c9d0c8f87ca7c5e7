"""Executors for tests that wrap another executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SamplingRow


class Wrapped:
    """An executor that delegates everything to the executor `inner`. A subclass overrides what its test
    observes."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Stepwise(Wrapped):
    """An executor that executes every decode step by its method `step`, so that a subclass sees all steps
    there."""

    def steps(
        self, step: ModelStep, params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        return [self.step(step, params).tokens]


def is_decode(step: ModelStep) -> bool:
    """Returns True if every sequence of a step has exactly one new token."""
    return len(step.tokens) == len(step.lengths)
