"""The interface between the engine and a device: what a loaded bundle can compute.

The engine forms batches and knows no device; a device computes steps and knows no requests. `loading.load`
returns the executor for a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mlcbuild_format.bundle import Manifest

from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, NextInput, Step
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow


class StepResult(NamedTuple):
    """The result of one step."""

    tokens: list[int]
    """The token that was drawn from each row of `Step.rows`; negative where there is none, see
    abi.NO_TOKEN and abi.INVALID_TOKEN."""
    logits: Callable[[], Floats]
    """Returns the masked logits, float32 [rows, vocabulary]. A device copies them to the host only for this
    call, which must come before the executor's next step. Later steps do not change the array; another
    call may return the same one."""


GuidedSteps = Generator[StepResult, Sequence[NextInput], None]


class Executor(Protocol):
    """A bundle that is loaded on a device.

    All methods but `interrupt` must be called from one thread. Methods may raise any exception: a step that
    has raised leaves the KV cache of its own sequences undefined, and no other.
    """

    @property
    def path(self) -> Path:
        """The bundle's directory."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def description(self) -> str:
        """What computes, in a few words for log lines, such as "threads 4"."""

    @property
    def pages(self) -> int:
        """Pages of the KV cache, of `manifest.limits.page_size` tokens each. They are numbered from 0."""

    @property
    def burst(self) -> int:
        """Maximum decode steps in one call of `steps` or `guided_steps`; 1 where a device has no loop."""

    @property
    def exact_rows(self) -> int:
        """Maximum rows of a step that is not a prompt's in which each row still has the bits that it has
        alone. Longer steps of drafts would change answers."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of abi.CAPABILITIES."""

    def step(self, step: Step, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepResult:
        """Writes the keys and values of the step's tokens to the KV cache, computes logits and draws tokens.

        sampling_params: one for each row of `step.rows`, of which there is at least one. masks: the rows that
        have a logit mask; the logits of all other tokens become minus infinity.
        """

    def steps(
        self, step: Step, sampling_params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        """Executes a decode step and those that follow it, up to `burst` in all.

        Returns the tokens of each executed step, one for each sequence. There is at least one; there are
        fewer than asked for where a sequence ends, where logits are NaN, and after `interrupt`.
        """

    def guided_steps(
        self, step: Step, sampling_params: Sequence[SamplingRow], masks: Masks, count: int
    ) -> GuidedSteps:
        """Yields the results of up to `count` decode steps, for a caller that decides after each step.

        The caller sends the next input of each sequence, or closes the generator. The sampling parameters
        but for the random number stay.
        """

    def hidden_states(self, step: Step) -> Floats:
        """Returns the hidden states after the last norm, float32 [tokens, hidden], of all the step's tokens,
        and writes their keys and values. Needs the capability "hidden_states"."""

    def sample(self, logits: Floats, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> list[int]:
        """Draws one token from each row of logits, float32 [rows, any size], which it may change. A row's
        token depends on nothing but the row, its parameters and its mask."""

    def interrupt(self) -> None:
        """Ends `steps` after the step that runs, until `resume`. May be called from any thread."""

    def resume(self) -> None:
        """Undoes `interrupt`."""

    @property
    def interrupted(self) -> bool: ...

    def prepare_pages(self, used: int) -> Iterator[None]:
        """Allocates memory for further pages of the KV cache while the engine is idle.

        used: pages that have ever been in use, which are the first ones. The caller stops between two items
        when it has work.
        """

    def seconds(self) -> float:
        """Reads a clock that runs while the device computes for the calling thread: the difference of two
        readings is what the steps between them cost, whatever else the machine does."""

    def close(self) -> None:
        """Frees the device's memory. No other method may be called after."""
