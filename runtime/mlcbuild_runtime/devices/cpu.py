"""The executor for CPUs: runs a bundle's library with TVM's runtime.

The TVM runtime is loaded once per process, by default with at most one thread per physical core. Weights are
mapped from their files and passed to the library without a copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from mlcbuild_format import abi, bundle, sizes
from mlcbuild_format.bundle import Limits, Manifest
from mlcbuild_format.errors import BundleError, SetupError

from mlcbuild_runtime.devices import cpu_library, machine, tensors
from mlcbuild_runtime.devices.cpu_library import Library
from mlcbuild_runtime.devices.cpu_tensors import BURST, Arguments, StepInputs, rows_of
from mlcbuild_runtime.devices.workers import Workers
from mlcbuild_runtime.executor import executor
from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, ModelStep
from mlcbuild_runtime.executor.executor import GuidedSteps, StepOutput
from mlcbuild_runtime.executor.loading import Loader
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

EXACT_ROWS = 16
"""Maximum number of rows in a decode step for which each row of logits has the same bits as in a step that
computes it alone; with more rows, they may differ."""
_MASKS = abi.STEP_ON.index("masks")
_STEPS_DONE = abi.STATE_COLUMNS.index("steps_done")


def load(path: Path, manifest: Manifest, threads: int | None, pages: int | None) -> CpuExecutor:
    """Loads a CPU bundle whose manifest has been read, and returns its executor. threads: number of computing
    threads, None for the default; only the first load in a process sets it, later ones ignore it. pages:
    number of pages of the KV cache, None for enough for a full batch of full contexts. Raises BundleError for
    a damaged bundle or one for another device or processor, SetupError if the TVM runtime is missing or
    cannot be loaded, the weights cannot be mapped, there is no memory for the KV cache, or TVM_NUM_THREADS is
    no number of threads."""
    refusal = machine.refusal(manifest.machine) or machine.prepare(manifest.machine)
    if refusal is not None:
        raise BundleError(f"{path}: {refusal}")
    threads = cpu_library.load_runtime(path, manifest, threads)
    return CpuExecutor(path, manifest, threads, pages or manifest.limits.pages)


class CpuExecutor:
    """A bundle loaded on a CPU. Methods without a docstring implement the interface executor.Executor, which
    documents them."""

    burst, exact_rows = BURST, EXACT_ROWS

    def __init__(self, path: Path, manifest: Manifest, threads: int, pages: int) -> None:
        """Loads the library of the bundle in directory `path`, maps its weights and creates the KV cache.
        Raises BundleError if the library cannot be loaded, or if the weights do not fit it, SetupError if
        they cannot be mapped, or if there is no memory for the KV cache."""
        self.path, self.manifest, self.threads, self.pages = path, manifest, threads, pages
        self._library = Library(path, manifest)
        self._weights = tensors.load(path, manifest.weights, self._library.metadata.params)
        self._params = tvm_ffi.convert([tvm_ffi.from_dlpack(tensor) for tensor in self._weights.arrays])
        self._cache = self._new_cache()
        self._inputs = StepInputs(manifest.limits.page_size)
        self._prepared = 0
        """Number of KV cache pages, counted from page 0, for which memory was allocated in advance while the
        engine was idle."""

    @classmethod
    def load(cls, path: Path | str, threads: int | None = None, pages: int | None = None) -> CpuExecutor:
        """Loads the CPU bundle in directory `path`, and returns its executor. threads: number of computing
        threads, None for the default; only the first load in a process sets it, later ones ignore it. pages:
        number of pages of the KV cache, None for enough for a full batch of full contexts. Raises BundleError
        for a damaged bundle or one for another device or processor, SetupError if the TVM runtime is missing
        or cannot be loaded, the weights cannot be mapped, there is no memory for the KV cache, or
        TVM_NUM_THREADS is no number of threads."""
        path = Path(path).absolute()
        return load(path, bundle.read(path), threads, pages)

    @property
    def description(self) -> str:
        return f"threads {self.threads}"

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    @cached_property
    def capabilities(self) -> frozenset[str]:
        return self._library.capabilities()

    def _new_cache(self) -> tvm_ffi.Tensor:
        """Returns a new tensor for the KV cache, whose memory the operating system allocates on first use.
        Raises SetupError if it refuses that much address space."""
        try:
            cache: tvm_ffi.Tensor = self._library.create_cache(tvm_ffi.Shape([self.pages]))
        except Exception as error:  # Whatever the library's code raises
            size = self.manifest.memory.kv_cache // self.limits.pages * self.pages
            *_, reason = type(error).__name__, *str(error).splitlines()  # MemoryError has no text.
            raise SetupError(
                f"{self.path}: its KV cache of {self.pages} pages needs {sizes.show(size)} of memory, which"
                f" cannot be allocated ({reason}): choose fewer with --max-pages, or"
                " raise this process's limits"
            ) from None
        array = np.from_dlpack(cache)
        tensors.prefer_large_pages(array.ctypes.data, array.nbytes)
        return cache

    def prepare_pages(self, used: int) -> Iterator[None]:
        """Allocates memory for pages of the KV cache in small parts while the engine is idle, until twice as
        many pages have memory as were ever in use, or all have; yields None after each part. used: number of
        pages that were ever in use."""
        first, last = max(used, self._prepared), min(2 * used, self.pages)
        for ready in tensors.back(np.from_dlpack(self._cache), first, last):
            self._prepared = ready
            yield

    def step(self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> StepOutput:
        arguments, sampling = self._arguments(step), self._inputs.sampling(sampling_params)
        arguments["sampling_params"], arguments["sampled"] = sampling.tensors
        arguments["masks"] = self._inputs.masks(masks)
        if step.prompt:
            function, ordered = self._library.step_prefill, abi.STEP_PREFILL.ordered(arguments)
        else:
            arguments["forks"] = self._inputs.forks(step)
            function, ordered = self._library.step, abi.STEP.ordered(arguments)
        with self._workers():
            logits = function(*ordered)
        return StepOutput(sampling.tokens.tolist(), lambda: rows_of(logits))

    def steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        """Executes a decode step and the steps after it in one call of the library; there is one later step
        for each entry of `following.random_numbers`, but none after a step in which a sequence ends or an
        interrupt comes. Returns one list for each executed step, with the sampled token of each sequence.
        Executes only the first step while it is unknown whether each computing thread gets a core of its own.
        """
        count = 1 + len(following.random_numbers) if self._workers().settled else 1
        loop, arguments = self._inputs.loop(step, sampling_params, following, count)
        ordered = abi.STEPS.ordered(self._with_model(arguments))
        with self._workers():
            self._library.steps(*ordered)
        tokens: list[list[int]] = loop.sampled[: loop.state[_STEPS_DONE]].tolist()
        return tokens

    def guided_steps(
        self, step: ModelStep, sampling_params: Sequence[SamplingRow], masks: Masks, count: int
    ) -> GuidedSteps:
        rows = len(sampling_params)
        following = FollowingSteps([[0.0] * rows] * (count - 1), [False] * rows, ())
        loop, arguments = self._inputs.loop(step, sampling_params, following, count)
        ordered = abi.STEP_ON.ordered(self._with_model(arguments))

        def read_logits() -> Floats:
            return rows_of(logits)

        with self._workers():
            while True:
                ordered[_MASKS] = self._inputs.masks(masks)
                logits = self._library.step_on(*ordered)
                inputs = yield StepOutput(loop.feed.tolist(), read_logits)
                masks = []
                for row, (token, random_number, mask) in enumerate(inputs):
                    self._inputs.set_next(loop, row, token, random_number)
                    if mask is not None:
                        masks.append((row, mask))

    def interrupt(self) -> None:
        self._inputs.interrupt[0] = 1

    def resume(self) -> None:
        self._inputs.interrupt[0] = 0

    @property
    def interrupted(self) -> bool:
        return bool(self._inputs.interrupt[0])

    def seconds(self) -> float:
        """Returns the CPU time of the calling thread in seconds: other processes do not add to it, however
        busy the machine is."""
        return time.thread_time()

    def forward(self, step: ModelStep) -> Floats:
        """Returns the logits of a step of the model, float32 [rows, vocabulary], without sampling tokens. The
        keys and values of its tokens are written to the KV cache."""
        return executor.forward(self, step)

    def sample(self, logits: Floats, sampling_params: Sequence[SamplingRow], masks: Masks = ()) -> list[int]:
        sampling = self._inputs.sampling(sampling_params)
        self._library.sample(tvm_ffi.from_dlpack(logits), *sampling.tensors, self._inputs.masks(masks))
        return sampling.tokens.tolist()

    def hidden_states(self, step: ModelStep) -> Floats:
        arguments = self._arguments(step)
        tokens = {"tokens": arguments.pop("tokens"), "params": self._params}
        embed = self._library.function(abi.EMBED)
        embedded = cast(Floats, np.from_dlpack(embed(*abi.EMBED.ordered(tokens))))
        del arguments["logit_positions"]
        arguments["input_embeds"] = tvm_ffi.from_dlpack(embedded[None])
        forward = self._library.function(abi.HIDDEN_STATES)
        with self._workers():
            states = forward(*abi.HIDDEN_STATES.ordered(arguments))
        return cast(Floats, np.from_dlpack(states).reshape(embedded.shape))

    def close(self) -> None:
        del self._library, self._params, self._weights, self._inputs, self._cache
        cpu_library.release_pools()

    def _arguments(self, step: ModelStep) -> Arguments:
        return self._with_model(self._inputs.batch(step))

    def _with_model(self, arguments: Arguments) -> Arguments:
        arguments["pages"], arguments["params"] = self._cache, self._params
        return arguments

    def _workers(self) -> Workers:
        """Returns the calling thread's object that chooses how many threads compute a step, from the CPU time
        that these get and the number of free processors. Each thread that calls the library has its own,
        because TVM has one thread pool per calling thread."""
        workers: Workers | None = getattr(_pool, "workers", None)
        if workers is None:
            workers = _pool.workers = Workers.of(self.threads, cpu_library.use_threads, machine.FreeCores())
        return workers

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> Floats:
        """Returns the logits of every position of one sequence, float32 [len(tokens), vocabulary]. chunk:
        number of tokens computed in one call; None, or more than the library's limit: that limit. The call
        overwrites the first pages of the KV cache, so no engine may use this executor at the same time.
        Raises ValueError if there is no token, more than the context or the cache holds, or one outside the
        vocabulary."""
        return executor.score(self, tokens, chunk)


_pool = threading.local()

if TYPE_CHECKING:  # mypy checks here that the class implements the protocol
    _: Loader = load
