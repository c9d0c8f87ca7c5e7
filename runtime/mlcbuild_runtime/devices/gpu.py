"""The executor of GPUs: it runs a bundle's program through wgpu. The most likely token is chosen on the GPU;
other sampling happens on the host, in float64, from the 64 largest logits if these suffice.

Rows of a decoding step are computed with kernels that give each row the bits that it has alone, prompts with
kernels on tiles. Greedy decoding runs several steps in one submit, with tokens and positions on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.bundle import Limits, Manifest
from mlcbuild_format.errors import BundleError
from mlcbuild_format.program import Program, evaluate

from mlcbuild_runtime.devices import gpu_adapter, gpu_program, host_sampling
from mlcbuild_runtime.devices.gpu_inputs import InputBlock, mask_words, tiles
from mlcbuild_runtime.devices.gpu_program import DeviceProgram
from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, ModelStep
from mlcbuild_runtime.executor.executor import GuidedSteps, StepOutput, guided_by_step, next_step
from mlcbuild_runtime.executor.loading import Loader
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow

BURST = 16
"""Maximum number of decode steps in one call: the GPU program stores the tokens of so many steps."""
_SUBMIT = 4
"""Maximum number of steps of greedy decoding in one submit to the GPU. The host waits for the GPU once per
submit, when it reads the tokens, so four tokens share one wait. An interrupt is noticed only between submits,
so after at most the kernel launches of four steps. `ci/bench/gpu --bundle BUNDLE --set
mlcbuild_runtime.devices.gpu._SUBMIT=8` compares other numbers."""
_TOP_WORDS = 2 + 2 * 64
_FUNCTIONS = ("advance", "decode", "greedy", "head", "mask", "prefill", "select", "top")
_BUFFERS = ("history", "inputs", "logits", "masks", "sampled", "selected", "top")
_INPUTS = (
    *("count", "first_page", "forks", "page_table", "positions", "rows", "slots", "tiles"),
    "tokens",
)
_SMALL_VOCABULARY = 256
"""Largest vocabulary, in tokens, for which all sampling with a temperature above 0 reads the whole row of
logits from the GPU. For a larger one, top_k, top_p and min_p are first applied to the 64 largest logits,
which the GPU selects; the whole row is read only if these do not suffice, or if none of the three is set."""


def load(path: Path, manifest: Manifest, threads: int | None, pages: int | None) -> GpuExecutor:
    """Loads a GPU bundle whose manifest has been read, and returns its executor. threads: not used; pages:
    number of pages of the KV cache, None for enough for a full batch of full contexts; fewer if the GPU's
    buffers cannot be so large. Raises BundleError for a bundle that is damaged or that the GPU cannot hold or
    run, also if not even one full context fits, SetupError if there is no GPU, its driver refuses, or wgpu is
    not installed."""
    program = gpu_program.read(path, manifest)
    _check_interface(path / manifest.library, program)
    _check_rows(path / manifest.library, program, manifest)
    _check_limits(path / manifest.library, program, manifest.limits)
    adapter = gpu_adapter.choose()
    program, limits = program.for_device(gpu_adapter.features(adapter)), manifest.limits
    count = gpu_program.cache_pages(program, pages or limits.pages, gpu_adapter.limits(adapter))
    if count < min(limits.sequence_pages, pages or limits.pages):
        raise BundleError(
            f"{path}: {gpu_adapter.describe(adapter)} allows {count} pages of KV cache, and a sequence of"
            f" {limits.context_window} tokens takes {limits.sequence_pages}: build with a smaller"
            " compile.context_window"
        )
    return GpuExecutor(path, manifest, DeviceProgram(path, manifest, adapter, program, count))


def _check_interface(file: Path, program: Program) -> None:
    """Raises BundleError for a GPU program that lacks a function, an input or an output that the executor
    uses. file: its path, for the message."""
    parts: Sequence[tuple[tuple[str, ...], Collection[str]]] = (
        (_FUNCTIONS, program.functions),
        (_BUFFERS, program.buffers),
        (_INPUTS, program.inputs),
        (("f", "m", "n", "q", "t"), program.sizes),
    )
    missing = [name for names, present in parts for name in names if name not in present]
    if missing or "n" not in program.functions["decode"][-1].sizes:
        missing_words = ", ".join(missing) or "the rows of decode"
        raise BundleError(
            f"{file}: a program that computes text needs {missing_words}; build the bundle again"
        )


def _check_rows(file: Path, program: Program, manifest: Manifest) -> None:
    """Raises BundleError if rows of logits or hidden states in the GPU program's buffers have other sizes
    than the model of the manifest: the executor would read bytes of another buffer, or beyond the last one.
    file: the program's path, for the message."""
    one_row = {**program.sizes, "pages": 1, "q": 1}
    # A model without a hidden size has no hidden states to read, and one word in their place.
    hidden = manifest.hidden_size if "hidden_size" in manifest.model.config else 1
    for name, width in (("logits", manifest.vocab_size), ("selected", hidden)):
        size = evaluate(program.buffers[name].size, one_row)
        if size != 4 * width:
            raise BundleError(
                f"{file}: a row of '{name}' has {size} bytes, and the model of bundle.json needs"
                f" {4 * width}; build the bundle again"
            )


def _check_limits(file: Path, program: Program, limits: Limits) -> None:
    """Raises BundleError if a GPU program was compiled for other limits than those of the manifest (tokens
    per page, pages, rows of a call and of a decoding step, positions): places in the KV cache or in the
    inputs of a call would be wrong. file: the program's path, for the message."""
    decode_rows = program.functions["decode"][-1].sizes["n"]
    figures = [
        ("tokens in a page of the KV cache", abi.PAGE, limits.page_size),
        ("pages of KV cache", program.sizes["pages"], limits.pages),
        ("rows in a call", program.sizes["n"], max(limits.rows, decode_rows)),
        ("rows in a decoding step", decode_rows, max(limits.max_batch, decode_rows)),
        *(("positions in a table", rope.rows, limits.context_window) for rope in program.ropes.values()),
    ]
    for unit, compiled, stated in figures:
        if compiled != stated:
            raise BundleError(
                f"{file}: the program has {compiled} {unit}, and the limits in bundle.json are for {stated};"
                " build the bundle again"
            )


class GpuExecutor:
    """A bundle loaded on a GPU. Methods without a docstring implement the interface executor.Executor, which
    documents them."""

    burst = BURST
    capabilities = frozenset(abi.CAPABILITIES)

    def __init__(self, path: Path, manifest: Manifest, program: DeviceProgram) -> None:
        """Creates the executor of the bundle in directory `path`. program: the bundle's GPU program, loaded
        on a device."""
        self.path, self.manifest, self.interrupted = path, manifest, False
        self.device = program
        sizes, functions = program.program.sizes, program.program.functions
        self.exact_rows = functions["decode"][-1].sizes["n"]
        self._logit_rows, self._mask_rows = sizes["q"], sizes["m"]
        self._inputs = InputBlock(program.program, manifest.limits.page_size)

    @property
    def pages(self) -> int:
        return self.device.pages

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    @property
    def description(self) -> str:
        return f"GPU {self.device.name}"

    def step(self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepOutput:
        tokens, rows_of_logits = list[int](), list[Floats]()
        several = len(step.rows) > self._logit_rows or self._passes(step)[1:]
        for first, last in self._passes(step):
            numbers = [number for number, row in enumerate(step.rows) if first <= row < last]
            for begin in range(0, len(numbers), self._logit_rows) or (0,):
                part = numbers[begin : begin + self._logit_rows]
                rows = [step.rows[number] - first for number in part]
                calls = self._prepare(step, (first, last), rows, begin > 0)
                own_masks = [(part.index(row), mask) for row, mask in masks if row in part]
                tokens += self._draw(calls, [sampling_params[number] for number in part], own_masks)
                if several:
                    rows_of_logits.append(self._read_logits(len(part)))
        if several:
            all_logits = np.concatenate(rows_of_logits)
            return StepOutput(tokens, lambda: all_logits)
        return StepOutput(tokens, lambda: self._read_logits(len(step.rows)))

    def _passes(self, step: ModelStep) -> list[tuple[int, int]]:
        """Divides the tokens of a step into ranges that are computed one after the other, since the kernels
        for decoding are limited in rows; a prompt is one range. Returns (index of the first token, index
        after the last) of each range."""
        count = len(step.tokens)
        if step.prompt or count <= self.exact_rows:
            return [(0, count)]
        return [(first, min(first + self.exact_rows, count)) for first in range(0, count, self.exact_rows)]

    def _prepare(
        self, step: ModelStep, part: tuple[int, int], rows: Sequence[int], again: bool
    ) -> list[tuple[str, dict[str, int]]]:
        """Uploads the inputs of a range of a step's tokens, and returns the calls of the GPU program that
        compute the logits: (function, name of a size -> value) each. part: (index of the range's first token,
        index after its last); rows: indices, counted from the first of these, of the tokens whose logits are
        computed; again: True if the last call computed the same range for other rows, so that only logits are
        missing."""
        head = [("head", {"q": len(rows)})] if rows else []
        if again:
            self.device.write("inputs", self._inputs.rows(rows))
            return head
        self.device.write("inputs", self._inputs.fill(step, *part, rows))
        return [self._trunk(step, part), *head]

    def _trunk(self, step: ModelStep, part: tuple[int, int]) -> tuple[str, dict[str, int]]:
        count = part[1] - part[0]
        if step.prompt:
            return "prefill", {"n": count, "t": len(tiles(step))}
        return "decode", {"n": count, "f": len(step.forks)}

    def _draw(
        self, calls: list[tuple[str, dict[str, int]]], params: Sequence[SamplingRow], masks: Masks
    ) -> list[int]:
        """Executes calls of the GPU program, applies masks to the logits that these compute, and returns a
        token sampled from each row of logits, NO_TOKEN for a row whose parameters request none, INVALID_TOKEN
        for one in which a logit is NaN or the largest one infinite. calls: (function, name of a size ->
        value) each; params: sampling parameters of each row; masks: (index of a row, mask with one bit per
        token, 1 if it is allowed) each. Raises EngineError if the GPU fails."""
        count = len(params)
        if masks:
            self._masked(calls, masks)
            calls = []
        temperatures = [row[0] for row in params]
        if any(temperature == 0 for temperature in temperatures):
            calls.append(("greedy", {"q": count}))
        uses_top = self.manifest.vocab_size > _SMALL_VOCABULARY and any(
            row[0] > 0 and (row[1] > -np.inf or row[2] < 1 or row[3] > 0) for row in params
        )
        if uses_top:
            calls.append(("top", {"q": count}))
        if calls:
            self.device.run(calls)
        greedy = self.device.read("sampled", 0, count).tolist() if 0 in temperatures else []
        top = self.device.read("top", 0, count * _TOP_WORDS).reshape(count, -1) if uses_top else None
        tokens = list[int]()
        for number, row in enumerate(params):
            if row[0] == 0:
                tokens.append(greedy[number])
            elif row[0] < 0:
                tokens.append(abi.NO_TOKEN)
            else:
                token = None if top is None else host_sampling.draw_from_top(top[number], row)
                tokens.append(self._drawn(number, row) if token is None else token)
        return tokens

    def _drawn(self, number: int, row: SamplingRow) -> int:
        """Reads the row of logits with index `number`, to which masks are applied already, from the GPU, and
        returns a token sampled from it on the host; INVALID_TOKEN if a logit is NaN or the largest one
        infinite."""
        return host_sampling.draw(self._read_logits(1, number)[0], row)

    def _masked(self, calls: list[tuple[str, dict[str, int]]], masks: Masks) -> None:
        self.device.run(calls)
        for first in range(0, len(masks), self._mask_rows):
            part = masks[first : first + self._mask_rows]
            self.device.write("masks", mask_words(part, self.manifest.vocab_size))
            self.device.run([("mask", {"m": len(part)})])

    def _read_logits(self, rows: int, first: int = 0) -> Floats:
        vocab = self.manifest.vocab_size
        return (
            self.device.read("logits", first * vocab, rows * vocab)
            .view(np.float32)
            .reshape(rows, vocab)
            .copy()
        )

    def steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        greedy = all(row[0] == 0 for row in sampling_params)
        if greedy and len(step.tokens) <= self._mask_rows:
            return self._greedy_steps(step, following)
        sampled, params = list[list[int]](), list(sampling_params)
        for numbers in [*following.random_numbers, None]:
            sampled.append(self.step(step, params).tokens)
            if numbers is None or self.interrupted or _ends(sampled[-1], following):
                break
            step = next_step(step, sampled[-1])
            params = [(*row[:-1], number) for row, number in zip(params, numbers, strict=True)]
        return sampled

    def _greedy_steps(self, step: ModelStep, following: FollowingSteps) -> list[list[int]]:
        """Executes decode steps in which the most likely token is sampled: `step`, and one for each entry of
        `following.random_numbers`, at most BURST in all. Returns one list for each executed step, with the
        token of each sequence; the last step is one in which a sequence ends, if any, and what the GPU
        computed after it is discarded. An interrupt ends them after the current submit, a group of steps in
        which tokens stay on the GPU."""
        rows, count = len(step.tokens), min(1 + len(following.random_numbers), BURST)
        calls = self._prepare(step, (0, rows), list(range(rows)), again=False)
        calls += [("greedy", {"q": rows}), ("advance", {"n": rows})]
        sampled = list[list[int]]()
        while len(sampled) < count and not (sampled and self.interrupted):
            more = 1 if self.interrupted else min(_SUBMIT, count - len(sampled))
            self.device.run(calls * more)
            history = self.device.read("history", len(sampled) * self._mask_rows, more * self._mask_rows)
            for tokens in history.reshape(more, -1)[:, :rows].tolist():
                sampled.append(tokens)
                if _ends(tokens, following):
                    return sampled
        return sampled

    def guided_steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks, count: int
    ) -> GuidedSteps:
        return guided_by_step(self, step, sampling_params, masks)

    def hidden_states(self, step: ModelStep) -> Floats:
        step, hidden = step._replace(prompt=True), self.manifest.hidden_size
        count, states = len(step.tokens), list[Floats]()
        for first in range(0, count, self._logit_rows):
            rows = list(range(first, min(first + self._logit_rows, count)))
            calls = self._prepare(step, (0, count), rows, first > 0)
            trunk = [call for call in calls if call[0] != "head"]
            self.device.run([*trunk, ("select", {"q": len(rows)})])
            read = self.device.read("selected", 0, len(rows) * hidden).view(np.float32)
            states.append(read.reshape(len(rows), hidden).copy())
        return np.concatenate(states)

    def sample(self, logits: Floats, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> list[int]:
        host_sampling.apply_masks(logits, masks)
        return [host_sampling.draw(row, params) for row, params in zip(logits, sampling_params, strict=True)]

    def interrupt(self) -> None:
        self.interrupted = True

    def resume(self) -> None:
        self.interrupted = False

    def prepare_pages(self, used: int) -> Iterator[None]:
        """Returns an iterator without elements and allocates nothing: the KV cache on a GPU has all its
        memory since the bundle was loaded."""
        yield from ()

    def seconds(self) -> float:
        """Returns the time of a clock in seconds. The difference between two calls is the time that the steps
        between them cost: wall time, because the calling thread does nothing else while the GPU computes."""
        return time.perf_counter()

    def close(self) -> None:
        self.device.close()


def _ends(tokens: Sequence[int], following: FollowingSteps) -> bool:
    return any(
        token < 0 or (stops and token in following.eos_tokens)
        for token, stops in zip(tokens, following.stops_at_eos, strict=True)
    )


if TYPE_CHECKING:  # mypy checks here that the class implements the protocol
    _: Loader = load
