"""The compiled library of a CPU bundle in this process, and the TVM runtime that executes it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlcbuild_format import abi, binary, library
from mlcbuild_format.bundle import Manifest
from mlcbuild_format.errors import BundleError, SetupError

from mlcbuild_runtime.devices import machine
from mlcbuild_runtime.devices.thread_count import default_threads, stay_on_socket

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

VERSION: str = tvm_ffi.__version__
SPINS = 2000
"""Number of rounds in which an idle worker of TVM's pool looks for work before it sleeps: about a
millisecond, which spans the gaps within a step. TVM's default of 300,000 takes CPU time from other processes
on shared cores: 2000 rounds gave a fifth more tokens per second beside processes that compute
(`ci/bench/busy`)."""
_CPU, _POOLED = 1, 2
"""DLPack's number for CPU memory (kDLCPU) and TVM's for a pooled allocator (AllocatorType::kPooled)."""


class Library:
    """The functions of a CPU bundle's library in this process. Functions that every step calls are looked up
    once, since a lookup costs as much as a small call."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Opens the library of the bundle in directory `path`. manifest: the bundle's. Raises BundleError if
        the library cannot be loaded, lacks a function that every step needs, or was built for another bundle.
        """
        self._vm, self._name = _open(path / manifest.library), manifest.library
        self.metadata = library.read_metadata(str(self.function(abi.METADATA)()), manifest)
        self.create_cache = self.function(abi.CREATE_CACHE)
        self.step, self.step_prefill = self.function(abi.STEP), self.function(abi.STEP_PREFILL)
        self.step_on, self.steps = self.function(abi.STEP_ON), self.function(abi.STEPS)
        self.sample = self.function(abi.SAMPLE)

    def function(self, function: abi.Function) -> Callable[..., Any]:
        """Returns the function of this compiled library that has the name of `function`, a description in the
        ABI. Only the name is compared, not which arguments the library's function takes. Raises BundleError
        if the library has no function of this name."""
        try:
            handle: Callable[..., Any] = self._vm[function.name]
        except AttributeError:
            raise BundleError(
                f"{self._name} has no function '{function.name}': build the bundle again"
            ) from None
        return handle

    def capabilities(self) -> frozenset[str]:
        """Returns the names of the capabilities, such as "decode_loop", all of whose functions the library
        has."""
        return frozenset(name for name, functions in abi.CAPABILITIES.items() if self._has(*functions))

    def _has(self, *functions: abi.Function) -> bool:
        try:
            for function in functions:
                self.function(function)
        except BundleError:
            return False
        return True


def _open(path: Path) -> tvm_ffi.Module:
    """Returns TVM's virtual machine for the library in the file `path`, initialised for the CPU. Raises
    BundleError if the library cannot be loaded."""
    try:
        vm: tvm_ffi.Module = tvm_ffi.load_module(str(path))["vm_load_executable"]()
        vm["vm_initialization"](_CPU, 0, _POOLED)
    except Exception as error:  # Whatever the library's code raises
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(f"{path}: the library cannot be loaded: {' '.join(reason)}") from None
    return vm


_loaded: list[ctypes.CDLL | None] = []
"""The TVM runtime of this process: empty until it is loaded, then a list of one library, or of None if
another package had loaded the runtime already."""


def load_runtime(path: Path, manifest: Manifest, threads: int | None) -> int:
    """Loads the TVM runtime, unless this process has loaded it already, and returns the number of its
    threads. The first call fixes this number, and later ones ignore `threads`: it is `threads`, or if that is
    None $TVM_NUM_THREADS, or else the default, with which the calling thread and threads that it starts later
    stay on one socket. Raises SetupError if the runtime is missing or cannot be loaded, or if TVM_NUM_THREADS
    is not a number of threads; BundleError if the runtime's file is damaged."""
    if not _loaded:
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
        if threads is not None:
            os.environ["TVM_NUM_THREADS"] = str(threads)
        if "TVM_NUM_THREADS" not in os.environ:
            os.environ["TVM_NUM_THREADS"] = str(default_threads())
            stay_on_socket()
        count = os.environ["TVM_NUM_THREADS"]
        if not count.isdecimal() or int(count) < 1:
            raise SetupError(f"TVM_NUM_THREADS is '{count}', which is not a number of at least 1")
        # Loading a second copy of the library would end a process that has imported tvm.
        is_loaded = tvm_ffi.get_global_func("vm.builtin.alloc_shape_heap", allow_missing=True) is not None
        _loaded.append(None if is_loaded else _load(library.find_runtime(path, manifest)))
    return int(os.environ["TVM_NUM_THREADS"])


def try_out(path: Path, manifest: Manifest) -> None:
    """Loads the library of the bundle in directory `path`, without weights, to see whether it can be loaded:
    damaged code may end the process. If this process had no TVM runtime yet, it then has one with one thread.
    Raises BundleError if the library cannot be loaded or is for another machine, SetupError if the TVM
    runtime is missing or cannot be loaded."""
    refusal = machine.refusal(manifest.machine) or machine.prepare(manifest.machine)
    if refusal is not None:
        raise BundleError(f"{path}: {refusal}")
    load_runtime(path, manifest, 1)
    Library(path, manifest)


def _load(path: Path) -> ctypes.CDLL:
    binary.check(path)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SetupError(f"{path}: the TVM runtime cannot be loaded: {error}") from None


def use_threads(count: int) -> None:
    """Sets how many threads compute in the thread pool that TVM has for the calling thread."""
    big_cores = 1  # TVM's ThreadGroup::AffinityMode::kBig
    tvm_ffi.get_global_func("runtime.config_threadpool")(big_cores, count)


def release_pools() -> None:
    """Returns to the system the memory that closed executors have left in TVM's pools."""
    gc.collect()
    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()
