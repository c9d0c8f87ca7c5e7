"""A model whose every step of decoding goes through `step`, for tests that look at them or change them."""

from __future__ import annotations

from collections.abc import Sequence

from mlcbuild_runtime.devices.cpu import Model
from mlcbuild_runtime.executor.batch import Onward, Step
from mlcbuild_runtime.executor.sampling_params import Way


class Stepwise(Model):
    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        return [self.step(step, ways)[1]]
