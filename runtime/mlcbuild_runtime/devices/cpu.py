"""The library of a bundle, loaded: the only module that touches tvm_ffi.

The TVM runtime is loaded once for a process, with its thread pool sized for the cores at hand. Weights are
mapped from their files and handed over without a copy. All calls must come from one thread: TVM's thread
pool belongs to the thread that uses it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from mlcbuild_format import abi, binary, bundle, library
from mlcbuild_format.bundle import Limits, Manifest
from mlcbuild_format.errors import BundleError, SetupError

from mlcbuild_runtime.devices import machine, tensors
from mlcbuild_runtime.devices.cpu_tensors import (
    MOST_STEPS,
    ChoiceTensors,
    Floats,
    IntTensors,
    LoopTensors,
    MaskTensors,
    rows_of,
    rows_tensor,
)
from mlcbuild_runtime.devices.threads import Workers
from mlcbuild_runtime.executor.batch import Further, Masks, Onward, Step
from mlcbuild_runtime.executor.sampling_params import SKIPPED, Way

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

__all__ = ["MOST_STEPS", "Floats", "Model", "forget_memory"]

SPINS = 2000
"""Times that an idle worker of TVM's pool looks for work before it sleeps: about a millisecond, which spans
the gaps within a step. TVM's own 300,000 take the time of others where cores are shared."""
_CPU, _POOLED = 1, 2
"""DLPack's kDLCPU and TVM's AllocatorType::kPooled."""

TABLE = 64
"""Entries of a table of pages: it has as many, or two times as many, and so on."""
_MASKS = abi.STEP_ON.index("masks")
_STEPS_DONE = abi.STATE_COLUMNS.index("steps_done")
_NUMBERS = (
    *("tokens", "logit_positions", "positions", "slots"),
    *("q_indptr", "page_indptr", "kv_lengths"),
)
"""Arguments of every step that lie in one block, in this order."""


class Model:
    """A loaded bundle. `forward` may be called from one thread only."""

    def __init__(self, path: Path, manifest: Manifest, threads: int, pages: int) -> None:
        """Use `load`."""
        self.path, self.manifest, self.threads, self.pages = path, manifest, threads, pages
        self._vm = _open(path / manifest.library)
        metadata = library.read_metadata(str(self._function(abi.METADATA)()), manifest)
        self._weights = tensors.load(path, manifest.weights, metadata.params)
        self._params = tvm_ffi.convert([tvm_ffi.from_dlpack(tensor) for tensor in self._weights.arrays])
        self._numbers, self._table = IntTensors(), IntTensors()
        self._create_cache = self._function(abi.CREATE_CACHE)
        functions = abi.STEP, abi.STEP_PREFILL, abi.STEP_ON, abi.STEPS, abi.CHOOSE
        self._step, self._prefill, self._step_on, self._steps, self._choose = map(self._function, functions)
        self._unforked = rows_tensor([], (0, 0, 0))
        self._choices: dict[int, ChoiceTensors] = {}
        self._loops: dict[int, LoopTensors] = {}
        self._ends: tuple[Collection[int], tvm_ffi.Tensor] = (), rows_tensor([], 0)
        halt = tensors.aligned(np.zeros(1, np.int32))
        self._halt, self._halted = halt.data, tvm_ffi.from_dlpack(halt)
        self._masks = MaskTensors()
        self._backed = 0

    def _function(self, function: abi.Function) -> Callable[..., Any]:
        """A handle, looked up once: a lookup costs as much as a small call. Raises BundleError."""
        try:
            found: Callable[..., Any] = self._vm[function.name]
        except AttributeError:
            named = f"{self.manifest.library} has no function '{function.name}'"
            raise BundleError(f"{named}: build the bundle again") from None
        return found

    @classmethod
    def load(cls, path: Path | str, threads: int | None = None, max_pages: int | None = None) -> Model:
        """Loads the bundle in directory `path`.

        threads: workers of this process (default: the physical cores at hand; the first load decides).
        max_pages: pages of the KV cache (default: enough for max_batch sequences of full length).
        Raises BundleError or SetupError with one sentence.
        """
        path = Path(path).absolute()
        manifest = bundle.read(path)
        refused = machine.refusal(manifest.machine) or machine.prepare(manifest.machine)
        if refused is not None:
            raise BundleError(f"{path}: {refused}")
        limits = manifest.limits
        threads = _load_runtime(path, manifest, threads)
        pages = limits.max_batch * -(-limits.context_window // limits.page_size)
        return cls(path, manifest, threads, min(pages, max_pages or pages))

    @property
    def limits(self) -> Limits:
        return self.manifest.limits

    @cached_property
    def _cache(self) -> tvm_ffi.Tensor:
        """Allocated at the first call, by the thread that calls; the system backs pages as they are used."""
        cache = self._create_cache(tvm_ffi.Shape([self.pages]))
        seen = np.from_dlpack(cache)
        tensors.prefer_large_pages(seen.ctypes.data, seen.nbytes)
        return cache

    def back(self, used: int) -> Iterator[None]:
        """Memory for as many pages of the KV cache again as have been `used`, which are the first ones. To be
        called by the thread that computes, which may stop whenever this rests."""
        first, last = max(used, self._backed), min(2 * used, self.pages)
        for ready in tensors.back(np.from_dlpack(self._cache), first, last):
            self._backed = ready
            yield

    def step(self, step: Step, ways: Sequence[Way], masks: Masks = ()) -> tuple[Floats, list[int]]:
        """Logits float32 [len(step.rows), vocab] after the KV cache has taken in the step's tokens, and the
        token that is chosen from each of these rows in its way; see sampling.Choose. masks: of a row, where
        not all tokens may be chosen; the logits of the others are minus infinity there.

        The array views memory of the VM that is its own: later calls do not change it.
        """
        given, choice = self._inputs(step), self._choice(ways)
        given["ways"], given["chosen"] = choice.tensors
        given["masks"] = self._masks.tensor(masks)
        if step.prompt:
            function, ordered = self._prefill, abi.STEP_PREFILL.ordered(given)
        else:
            given["forks"] = rows_tensor(step.forks, (0, 0, 0)) if step.forks else self._unforked
            function, ordered = self._step, abi.STEP.ordered(given)
        with self._workers():
            logits = function(*ordered)
        return rows_of(logits), choice.tokens.tolist()

    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        """Tokens of a step of decoding and of those that follow it, up to MOST_STEPS in all: of each step, of
        each sequence, which has pages for them. There are fewer steps where a sequence comes to its end,
        where logits are not numbers, after `halt`, and while it is not clear how many threads the machine has
        room for."""
        count = 1 + len(onward.numbers) if self._workers().settled else 1
        loop, given = self._onward(step, ways, onward, count)
        with self._workers():
            self._steps(*given)
        found: list[list[int]] = loop.taken[: loop.state[_STEPS_DONE]].tolist()
        return found

    def tended(
        self, step: Step, ways: Sequence[Way], masks: Masks, count: int
    ) -> Generator[tuple[Callable[[], Floats], list[int]], Sequence[Further]]:
        """As `step` and what follows it, up to MOST_STEPS in all, for a caller that looks at each: gives what
        `step` gives, the logits when they are asked for, and takes what each sequence has further."""
        onward = Onward([[0.0] * len(ways)] * (count - 1), [False] * len(ways), ())
        loop, given = self._onward(step, ways, onward, count)
        choice = self._choices[len(ways)]

        def rows() -> Floats:
            return rows_of(logits)

        with self._workers():
            while True:
                given[_MASKS] = self._masks.tensor(masks)
                logits = self._step_on(*given)
                further = yield rows, loop.feed.tolist()
                masks = []
                for row, (token, number, mask) in enumerate(further):
                    loop.feed[row], choice.numbers[row][0] = token, number
                    if mask is not None:
                        masks.append((row, mask))

    def _onward(
        self, step: Step, ways: Sequence[Way], onward: Onward, count: int
    ) -> tuple[LoopTensors, list[object]]:
        """What `count` steps, at most, work with, and as the library's functions take it."""
        given = self._inputs(step)
        choice, loop = self._choice(ways), self._loops.get(len(ways))
        if loop is None:
            loop = self._loops[len(ways)] = LoopTensors(len(ways))
        if onward.ends != self._ends[0]:
            self._ends = onward.ends, rows_tensor(sorted(onward.ends), 0)
        if onward.numbers:
            loop.numbers[1 : 1 + len(onward.numbers)] = onward.numbers
        loop.tokens[:], loop.heeds[:] = step.tokens, onward.heeds
        loop.state[:] = abi.LoopState(steps_done=0, pause_after=count, step_limit=count)
        given |= {"tokens": loop.next, "ways": choice.tensors[0], "masks": self._masks.tensor(())}
        given |= {"ends": self._ends[1], "stop": self._halted, **loop.tensors}
        return loop, abi.STEP_ON.ordered(given)

    def halt(self, wanted: bool = True) -> None:
        """No step follows the one that runs, until this is taken back. May be called from any thread."""
        self._halt[0] = wanted

    @property
    def halted(self) -> bool:
        return bool(self._halt[0])

    def forward(self, step: Step) -> Floats:
        """The logits of `step`: no tokens are chosen."""
        return self.step(step, [SKIPPED] * len(step.rows))[0]

    def choose(self, logits: Floats, ways: Sequence[Way], masks: Masks = ()) -> list[int]:
        """One token for each row of logits float32 [q, size], of any size; see sampling.Choose."""
        choice = self._choice(ways)
        self._choose(tvm_ffi.from_dlpack(logits), *choice.tensors, self._masks.tensor(masks))
        return choice.tokens.tolist()

    def _choice(self, ways: Sequence[Way]) -> ChoiceTensors:
        choice = self._choices.get(len(ways))
        if choice is None:
            choice = self._choices[len(ways)] = ChoiceTensors(len(ways))
        choice.ways[:] = ways
        return choice

    def states(self, step: Step) -> Floats:
        """Hidden states float32 [n, hidden], after the last norm, of all the step's tokens, which the KV
        cache takes in. Raises BundleError where the library does not give them."""
        given = self._inputs(step)
        tokens = {"tokens": given.pop("tokens"), "params": self._params}
        embedded = cast(Floats, np.from_dlpack(self._function(abi.EMBED)(*abi.EMBED.ordered(tokens))))
        function = abi.HIDDEN_STATES if len(step.lengths) == 1 else abi.BATCH_HIDDEN_STATES
        del given["logit_positions"]
        given["input_embeds"] = tvm_ffi.from_dlpack(embedded[None])
        with self._workers():
            found = self._function(function)(*function.ordered(given))
        return cast(Floats, np.from_dlpack(found).reshape(embedded.shape))

    @cached_property
    def gives_states(self) -> bool:
        """The library has the functions for `states`: those of older builders have not."""
        try:
            list(map(self._function, abi.CAPABILITIES["hidden_states"]))
        except BundleError:
            return False
        return True

    def _workers(self) -> Workers:
        """Of the calling thread, to which TVM's pool belongs."""
        found: Workers | None = getattr(_pool, "workers", None)
        if found is None:
            configure, big_cores = tvm_ffi.get_global_func("runtime.config_threadpool"), 1
            found = _pool.workers = Workers.of(
                self.threads, lambda count: configure(big_cores, count), machine.free_cores
            )
        return found

    def _inputs(self, step: Step) -> dict[str, object]:
        """A step's tokens, its rows, and where keys and values are, by their names in the ABI."""
        places = step.places(self.limits.page_size)
        numbers = self._numbers.tensors(
            step.tokens, step.rows, *places, step.indptr, step.page_indptr, step.lengths
        )
        # Filled up, so that its size changes with few of all pages.
        (table,) = self._table.tensors(step.page_table + [0] * (-len(step.page_table) % TABLE))
        given: dict[str, object] = dict(zip(_NUMBERS, numbers, strict=True))
        given["pages"], given["page_table"], given["params"] = self._cache, table, self._params
        return given

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> Floats:
        """Logits float32 [len(tokens), vocab] of every position of one sequence.

        chunk: tokens of one call (default: the library's limit); 1 takes the way of decoding.
        Uses the first pages of the KV cache: not to be mixed with an engine on the same model.
        Raises ValueError when the sequence or a token does not fit the model.
        """
        bundle.check_tokens(tokens, self.manifest)
        limits = self.limits
        if not 0 < len(tokens) <= min(limits.context_window, self.pages * limits.page_size):
            raise ValueError(f"{len(tokens)} tokens do not fit a context of {limits.context_window}")
        size = min(chunk or limits.prefill_chunk, limits.prefill_chunk)
        return np.concatenate(list(self._score_chunks(tokens, size)))

    def _score_chunks(self, tokens: Sequence[int], size: int) -> Iterator[Floats]:
        page_size = self.limits.page_size
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            end = start + len(chunk)
            pages = range(-(-end // page_size))
            yield self.forward(Step.of([(chunk, end, pages)], [len(chunk)])).copy()


def forget_memory() -> None:
    """Gives memory back to the system that models which are gone have left in TVM's pools."""
    gc.collect()
    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()


def _load_runtime(path: Path, manifest: Manifest, threads: int | None) -> int:
    """Loads TVM's runtime library into this process, once; returns the threads it works with."""
    if not _loaded:
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
        if threads is not None:
            os.environ["TVM_NUM_THREADS"] = str(threads)
        wanted = os.environ.setdefault("TVM_NUM_THREADS", str(machine.default_threads()))
        if not wanted.isdecimal() or int(wanted) < 1:
            raise SetupError(f"TVM_NUM_THREADS is '{wanted}', which is not a number of at least 1")
        # A second copy of the library would end a process that has imported tvm.
        there = tvm_ffi.get_global_func("vm.builtin.alloc_shape_heap", allow_missing=True) is not None
        _loaded.append(None if there else _load_library(library.find_runtime(path, manifest)))
    return int(os.environ["TVM_NUM_THREADS"])


_pool = threading.local()
_loaded: list[ctypes.CDLL | None] = []
"""The TVM runtime, once it is loaded; None: by somebody else."""


def _load_library(path: Path) -> ctypes.CDLL:
    binary.check(path)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SetupError(f"{path}: the TVM runtime cannot be loaded: {error}") from None


def _open(path: Path) -> tvm_ffi.Module:
    """The Relax VM of a library, initialised for the CPU. Raises BundleError."""
    try:
        vm: tvm_ffi.Module = tvm_ffi.load_module(str(path))["vm_load_executable"]()
        vm["vm_initialization"](_CPU, 0, _POOLED)
    except Exception as error:  # whatever the library's own code raises
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(f"{path}: the library cannot be loaded: {' '.join(reason)}") from None
    return vm
