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
from itertools import accumulate, chain
from operator import add
from pathlib import Path
from struct import Struct
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime import binary, bundle, library, machine, tensors
from mlcbuild_runtime.bundle import Limits, Manifest
from mlcbuild_runtime.errors import BundleError, SetupError
from mlcbuild_runtime.sampling import SKIPPED, WAY, Way
from mlcbuild_runtime.step import Further, Masks, Onward, Step
from mlcbuild_runtime.threads import Workers

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

SPINS = 2000
"""Times that an idle worker of TVM's pool looks for work before it sleeps: about a millisecond, which spans
the gaps within a step. TVM's own 300,000 take the time of others where cores are shared."""
_CPU, _POOLED = 1, 2
"""DLPack's kDLCPU and TVM's AllocatorType::kPooled."""

Floats = NDArray[np.float32]
MOST_STEPS = 16
"""That are one call of the library."""
TABLE = 64
"""Entries of a table of pages: it has as many, or two times as many, and so on."""


class _Numbers:
    """int32 tensors that every step has. They lie in one block, which is written at once."""

    def __init__(self) -> None:
        self._sizes: list[int] | None = None
        self._block, self._form = memoryview(b""), Struct("")
        self._tensors: list[tvm_ffi.Tensor] = []

    def tensors(self, *lists: list[int]) -> list[tvm_ffi.Tensor]:
        """Valid until the next call."""
        sizes = list(map(len, lists))
        if sizes != self._sizes:
            self._arrange(sizes)
        self._form.pack_into(self._block, 0, *chain.from_iterable(lists))
        return self._tensors

    def _arrange(self, sizes: list[int]) -> None:
        gaps = [-size % _LINE for size in sizes]
        starts = [0, *accumulate(map(add, sizes, gaps))]
        block = tensors.aligned(np.zeros(starts[-1], np.int32))
        parts = [f"{size}i{4 * gap}x" for size, gap in zip(sizes, gaps, strict=True)]
        self._sizes, self._block, self._form = sizes, block.data, Struct("=" + "".join(parts))
        views = [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._tensors = [tvm_ffi.from_dlpack(view) for view in views]


_LINE = tensors.ALIGNMENT // 4
_MASKS = 3
"""Which argument of `step_on` the masks are."""


class _Choice:
    """What goes into the choice of tokens for so many rows, and what comes out of it."""

    def __init__(self, rows: int) -> None:
        self.ways = tensors.aligned(np.empty((rows, WAY), np.float64))
        self.numbers = [way[-1:].data for way in self.ways]
        """The random number of each way, as something that is quickly set."""
        self.tokens = np.empty(rows, np.int32)
        self.tensors = [tvm_ffi.from_dlpack(array) for array in (self.ways, self.tokens)]


class _Loop:
    """What goes into several steps of so many sequences, and what comes out of them."""

    def __init__(self, rows: int) -> None:
        self.numbers = tensors.aligned(np.zeros((MOST_STEPS, rows)))
        self.tokens, self.heeds, self.taken, self.state = (
            tensors.aligned(np.zeros(shape, np.int32)) for shape in (rows, rows, (MOST_STEPS, rows), 3)
        )
        again = tensors.aligned(np.zeros(1, np.bool_)).reshape(())
        self.next, self.feed = tvm_ffi.from_dlpack(self.tokens), self.tokens.data
        self.fixed = [tvm_ffi.from_dlpack(array) for array in (self.numbers, self.heeds)]
        self.changed = [tvm_ffi.from_dlpack(array) for array in (self.taken, self.state, again)]


class _Masks:
    """Masks as a library takes them: the row of each, then its bits. Each call overwrites the last one's."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], tuple[list[memoryview], tvm_ffi.Tensor]] = {}

    def tensor(self, masks: Masks) -> tvm_ffi.Tensor:
        size = len(masks), len(masks[0][1]) if masks else 0
        found = self._blocks.get(size)
        if found is None:
            block = np.empty((max(1, size[0]), 1 + size[1]), np.int32)[: size[0]]
            found = self._blocks[size] = [row.data for row in block], tvm_ffi.from_dlpack(block)
        for own, (row, mask) in zip(found[0], masks, strict=True):
            own[0], own[1:] = row, mask.data
        return found[1]


def _rows_of(logits: tvm_ffi.Tensor) -> Floats:
    return cast(Floats, np.from_dlpack(logits)[0])


def _rows(rows: Sequence[object], one: object) -> tvm_ffi.Tensor:
    """int32, with as many rows, each like `one`."""
    return tvm_ffi.from_dlpack(tensors.aligned(np.array(rows or [one], np.int32))[: len(rows)])


class Model:
    """A loaded bundle. `forward` may be called from one thread only."""

    def __init__(self, path: Path, manifest: Manifest, threads: int, pages: int) -> None:
        """Use `load`."""
        self.path, self.manifest, self.threads, self.pages = path, manifest, threads, pages
        self._vm = _open(path / manifest.library)
        metadata = library.read_metadata(str(self._function("_metadata")()), manifest)
        self._weights = tensors.load(path, manifest.weights, metadata.params)
        self._params = tvm_ffi.convert([tvm_ffi.from_dlpack(tensor) for tensor in self._weights.arrays])
        self._numbers, self._table = _Numbers(), _Numbers()
        self._create_cache = self._function("create_paged_kv_cache")
        names = "step", "step_prefill", "step_on", "steps", "choose"
        self._step, self._prefill, self._step_on, self._steps, self._choose = map(self._function, names)
        self._unforked = _rows([], (0, 0, 0))
        self._choices: dict[int, _Choice] = {}
        self._loops: dict[int, _Loop] = {}
        self._ends: tuple[Collection[int], tvm_ffi.Tensor] = (), _rows([], 0)
        halt = tensors.aligned(np.zeros(1, np.int32))
        self._halt, self._halted = halt.data, tvm_ffi.from_dlpack(halt)
        self._masks = _Masks()
        self._backed = 0

    def _function(self, name: str) -> Callable[..., Any]:
        """A handle, looked up once: a lookup costs as much as a small call. Raises BundleError."""
        try:
            found: Callable[..., Any] = self._vm[name]
        except AttributeError:
            library_name = self.manifest.library
            raise BundleError(f"{library_name} has no function '{name}': build the bundle again") from None
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
        tokens, rows, batch = self._inputs(step)
        choice, function = self._choice(ways), self._prefill
        if not step.prompt:
            function = self._step
            batch.append(_rows(step.forks, (0, 0, 0)) if step.forks else self._unforked)
        with self._workers():
            logits = function(tokens, rows, *choice.tensors, self._masks.tensor(masks), *batch, self._params)
        return _rows_of(logits), choice.tokens.tolist()

    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        """Tokens of a step of decoding and of those that follow it, up to MOST_STEPS in all: of each step, of
        each sequence, which has pages for them. There are fewer steps where a sequence comes to its end,
        where logits are not numbers, after `halt`, and while it is not clear how many threads the machine has
        room for."""
        count = 1 + len(onward.numbers) if self._workers().settled else 1
        loop, given = self._onward(step, ways, onward, (0, count, count))
        with self._workers():
            self._steps(*given)
        found: list[list[int]] = loop.taken[: loop.state[0]].tolist()
        return found

    def tended(
        self, step: Step, ways: Sequence[Way], masks: Masks, count: int
    ) -> Generator[tuple[Callable[[], Floats], list[int]], Sequence[Further]]:
        """As `step` and what follows it, up to MOST_STEPS in all, for a caller that looks at each: gives what
        `step` gives, the logits when they are asked for, and takes what each sequence has further."""
        onward = Onward([[0.0] * len(ways)] * (count - 1), [False] * len(ways), ())
        loop, given = self._onward(step, ways, onward, (0, count, count))
        choice = self._choices[len(ways)]

        def rows() -> Floats:
            return _rows_of(logits)

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
        self, step: Step, ways: Sequence[Way], onward: Onward, state: tuple[int, int, int]
    ) -> tuple[_Loop, list[object]]:
        """What a step and those after it work with, and as the library's functions take it."""
        _, rows, batch = self._inputs(step)
        choice, loop = self._choice(ways), self._loops.get(len(ways))
        if loop is None:
            loop = self._loops[len(ways)] = _Loop(len(ways))
        if onward.ends != self._ends[0]:
            self._ends = onward.ends, _rows(sorted(onward.ends), 0)
        if onward.numbers:
            loop.numbers[1 : 1 + len(onward.numbers)] = onward.numbers
        loop.tokens[:], loop.heeds[:], loop.state[:] = step.tokens, onward.heeds, state
        follow = [*loop.fixed, self._ends[1], self._halted, *loop.changed]
        own = [loop.next, rows, choice.tensors[0], self._masks.tensor(()), *follow]
        return loop, [*own, *batch, self._params]

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

    def _choice(self, ways: Sequence[Way]) -> _Choice:
        choice = self._choices.get(len(ways))
        if choice is None:
            choice = self._choices[len(ways)] = _Choice(len(ways))
        choice.ways[:] = ways
        return choice

    def states(self, step: Step) -> Floats:
        """Hidden states float32 [n, hidden], after the last norm, of all the step's tokens, which the KV
        cache takes in. Raises BundleError where the library does not give them."""
        tokens, _, batch = self._inputs(step)
        embedded = cast(Floats, np.from_dlpack(self._function("embed")(tokens, self._params)))
        name = ("" if len(step.lengths) == 1 else "batch_") + "prefill_to_last_hidden_states"
        with self._workers():
            found = self._function(name)(tvm_ffi.from_dlpack(embedded[None]), *batch, self._params)
        return cast(Floats, np.from_dlpack(found).reshape(embedded.shape))

    @cached_property
    def gives_states(self) -> bool:
        """The library has the functions for `states`: those of older builders have not."""
        try:
            self._function("prefill_to_last_hidden_states")
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

    def _inputs(self, step: Step) -> tuple[tvm_ffi.Tensor, tvm_ffi.Tensor, list[object]]:
        """A step's tokens, its rows, and where keys and values are, as the library's functions take it."""
        places = step.places(self.limits.page_size)
        tokens, rows, *batch, lengths = self._numbers.tensors(
            step.tokens, step.rows, *places, step.indptr, step.page_indptr, step.lengths
        )
        # Filled up, so that its size changes with few of all pages.
        table = self._table.tensors(step.page_table + [0] * (-len(step.page_table) % TABLE))
        return tokens, rows, [self._cache, *batch, *table, lengths]

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
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(f"{path}: the library cannot be loaded: {' '.join(reason)}") from None
    return vm
