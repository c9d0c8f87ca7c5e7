"""The library of a bundle, loaded: the only module that touches tvm_ffi.

The TVM runtime is loaded once for a process, with its thread pool sized for the cores at hand. Weights are
mapped from their files and handed over without a copy. All calls must come from one thread: TVM's thread
pool belongs to the thread that uses it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, chain
from operator import add
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mlcbuild_runtime import binary, bundle, library, machine, tensors
from mlcbuild_runtime.bundle import Limits, Manifest
from mlcbuild_runtime.errors import BundleError, SetupError
from mlcbuild_runtime.sampling import SKIPPED, WAY, Way
from mlcbuild_runtime.threads import Workers

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

SPINS = 2000
"""Times that an idle worker of TVM's pool looks for work before it sleeps: about a millisecond, which spans
the gaps within a step. TVM's own 300,000 take the time of others where cores are shared."""
RUNTIME_VARIABLE = "MLCBUILD_TVM_RUNTIME"
_CPU, _POOLED = 1, 2
"""DLPack's kDLCPU and TVM's AllocatorType::kPooled."""

Floats = NDArray[np.float32]
Mask = NDArray[np.int32]
"""Bits of tokens that may be chosen, from the lowest on, in no fewer words than the vocabulary takes."""


class Step(NamedTuple):
    """New tokens of some sequences, as ragged rows, and where their keys and values live.

    Sequence s owns tokens[indptr[s]:indptr[s+1]] and pages page_table[page_indptr[s]:page_indptr[s+1]];
    `lengths[s]` is its length after this step. `rows` are the rows of `tokens` whose logits are wanted.
    These are plain lists: a decoding step has streamed the model through every cache, and each call of NumPy
    then costs more than all these numbers.
    """

    tokens: list[int]
    indptr: list[int]
    lengths: list[int]
    page_indptr: list[int]
    page_table: list[int]
    rows: list[int]
    prompt: bool
    """The tokens are prompts'. A library may have a faster way for these, which rounds differently, so that
    what a sequence gets must not depend on how many tokens others bring."""
    forks: Sequence[tuple[int, int, int]] = ()
    """(from page, to page, tokens): what pages begin with, in this order, once all new tokens are there; for
    branches of drafts."""

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        wanted: Sequence[int] | None = None,
        prompt: bool | None = None,
    ) -> Step:
        """From (new tokens, length after them, pages) of each sequence. A negative page is one that no layer
        looks at any more.
        wanted: of how many of its last tokens the logits are wanted, for each sequence (default: 1).
        prompt: by default where any sequence has more than one new token."""
        tokens, lengths, rows, table = list[int](), list[int](), list[int](), list[int]()
        indptr, page_indptr = [0], [0]
        for (new, length, pages), count in zip(parts, wanted or [1] * len(parts), strict=True):
            tokens += new
            lengths.append(length)
            table += pages
            end = len(tokens)
            rows += range(end - count, end)
            indptr.append(end)
            page_indptr.append(len(table))
        if min(table, default=0) < 0:
            table = [max(0, page) for page in table]
        many = len(tokens) > len(parts)
        return cls(tokens, indptr, lengths, page_indptr, table, rows, many if prompt is None else prompt)

    @property
    def is_decode(self) -> bool:
        """Every sequence has one new token."""
        return len(self.tokens) == len(self.lengths)

    def places(self, page_size: int) -> tuple[list[int], list[int]]:
        """Of each new token: its position in its sequence; page * page_size + offset where its key and value
        go."""
        positions, slots = list[int](), list[int]()
        for s, length in enumerate(self.lengths):
            first = self.page_indptr[s]
            for position in range(length - self.indptr[s + 1] + self.indptr[s], length):
                page, offset = divmod(position, page_size)
                positions.append(position)
                slots.append(self.page_table[first + page] * page_size + offset)
        return positions, slots


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


class _Choice:
    """What goes into the choice of tokens for so many rows, and what comes out of it."""

    def __init__(self, rows: int) -> None:
        self.ways, self.tokens = np.empty((rows, WAY), np.float64), np.empty(rows, np.int32)
        self.tensors = [tvm_ffi.from_dlpack(array) for array in (self.ways, self.tokens)]


class _Masks:
    """Masks as a library takes them: the row of each, then its bits. Each call overwrites the last one's."""

    def __init__(self, vocab_size: int) -> None:
        self._width = 1 + -(-vocab_size // 32)
        self._room(0)

    def _room(self, count: int) -> None:
        self._block = np.empty((max(1, count), self._width), np.int32)[:count]
        self._tensor = tvm_ffi.from_dlpack(self._block)

    def tensor(self, masks: Sequence[tuple[int, Mask]]) -> tvm_ffi.Tensor:
        if len(masks) != len(self._block):
            self._room(len(masks))
        for line, (row, mask) in zip(self._block, masks, strict=True):
            line[0], line[1:] = row, mask[: self._width - 1]
        return self._tensor


def _forks(forks: Sequence[tuple[int, int, int]]) -> tvm_ffi.Tensor:
    """int32 [len(forks), 3]."""
    return tvm_ffi.from_dlpack(tensors.aligned(np.array(forks or [(0, 0, 0)], np.int32))[: len(forks)])


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
        self._step, self._prefill, self._sample = map(self._function, ("step", "step_prefill", "sample"))
        self._unforked = _forks([])
        self._choices: dict[int, _Choice] = {}
        self._masks = _Masks(manifest.vocab_size)

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

    def step(
        self, step: Step, ways: Sequence[Way], masks: Sequence[tuple[int, Mask]] = ()
    ) -> tuple[Floats, list[int]]:
        """Logits float32 [len(step.rows), vocab] after the KV cache has taken in the step's tokens, and the
        token that is chosen from each of these rows in its way; see sampling.Choose. masks: of a row, where
        not all tokens may be chosen; the logits of the others are minus infinity there.

        The array views memory of the VM that is its own: later calls do not change it.
        """
        tokens, rows, batch = self._inputs(step)
        choice, function = self._choice(ways), self._prefill
        if not step.prompt:
            function = self._step
            batch.append(_forks(step.forks) if step.forks else self._unforked)
        with self._workers():
            logits = function(tokens, rows, *choice.tensors, self._masks.tensor(masks), *batch, self._params)
        return cast(Floats, np.from_dlpack(logits)[0]), choice.tokens.tolist()

    def forward(self, step: Step) -> Floats:
        """The logits of `step`: no tokens are chosen."""
        return self.step(step, [SKIPPED] * len(step.rows))[0]

    def choose(self, logits: Floats, ways: Sequence[Way]) -> list[int]:
        """One token for each row of logits float32 [q, size], of any size; see sampling.Choose."""
        choice = self._choice(ways)
        self._sample(tvm_ffi.from_dlpack(logits[None]), *choice.tensors)
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
        table = self._table.tensors(step.page_table)
        return tokens, rows, [self._cache, *batch, *table, lengths]

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> Floats:
        """Logits float32 [len(tokens), vocab] of every position of one sequence.

        chunk: tokens of one call (default: the library's limit); 1 takes the way of decoding.
        Uses the first pages of the KV cache: not to be mixed with an engine on the same model.
        Raises ValueError when the sequence or a token does not fit the model.
        """
        check_tokens(tokens, self.manifest)
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


def check_tokens(tokens: Sequence[int], manifest: Manifest) -> None:
    """Raises ValueError for a token outside the vocabulary: the library would read beyond its table."""
    vocab_size = manifest.vocab_size
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size} tokens")


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
        _loaded.append(None if there else _load_library(_find_runtime(path, manifest)))
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


def _find_runtime(path: Path, manifest: Manifest) -> Path:
    """The TVM runtime library: in the bundle, named by RUNTIME_VARIABLE, or beside an installed tvm."""
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    if f"lib/{name}" in manifest.files:
        return path / "lib" / name
    named = os.environ.get(RUNTIME_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise SetupError(f"{RUNTIME_VARIABLE} is '{named}', which is not a file")
        return Path(named)
    spec = find_spec("tvm")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        candidate = Path(place, "lib", name)
        if candidate.is_file():
            return candidate
    raise SetupError(
        f"{path}: the bundle brings no TVM runtime (lib/{name}) and this machine has none: set"
        f" {RUNTIME_VARIABLE} to a {name} of version {manifest.tools.get('apache-tvm', 'unknown')}"
    )


def _open(path: Path) -> tvm_ffi.Module:
    """The Relax VM of a library, initialised for the CPU. Raises BundleError."""
    try:
        vm: tvm_ffi.Module = tvm_ffi.load_module(str(path))["vm_load_executable"]()
        vm["vm_initialization"](_CPU, 0, _POOLED)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(f"{path}: the library cannot be loaded: {' '.join(reason)}") from None
    return vm
