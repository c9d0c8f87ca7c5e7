"""Runs a compiled library as a serving process would: tvm_ffi and libtvm_runtime, never the `tvm` package.

Used by tests of the compiler. Weights are NumPy arrays in the library's order; sequences get pages in a
shuffled order, and the cache starts filled with NaN, so that reading what was never written shows.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from mlcbuild_format import abi
from mlcbuild_runtime.devices import machine
from numpy.typing import NDArray

from mlcbuild import canon, models, quant
from mlcbuild.canon import Json
from mlcbuild.checkpoints import conversion
from mlcbuild.compiler.cpu.action import compile_library
from mlcbuild.models import ModelConfig, parameters, parsing
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from tests import compiler_process, schemes

Array = NDArray[Any]
Floats = NDArray[np.float32]
PAGE = 16
EVERY = "MLCBUILD_TEST_EVERY" in os.environ
"""True if the environment variable MLCBUILD_TEST_EVERY is set. Tests then cover every combination, such as
each quantization scheme on each instruction set, for half an hour; otherwise only those that reveal most
faults."""


@cache
def _ffi() -> Any:
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_NUM_THREADS", "2")
    import tvm_ffi

    spec = find_spec("tvm")
    assert spec is not None and spec.submodule_search_locations
    runtime = Path(spec.submodule_search_locations[0], "lib", "libtvm_runtime.so")
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    machine.allow_tiles()
    return tvm_ffi


def aligned(array: Array) -> Array:
    """Returns a copy of the array whose data start at a multiple of 64 bytes, as kernels may assume."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    created = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    created[...] = array
    return created


def tensor(array: Array) -> Any:
    return _ffi().from_dlpack(aligned(np.ascontiguousarray(array)))


def pack(config: ModelConfig, scheme: quant.Storage, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Quantizes the parameters `weights`, name -> array, and returns the tensors that store them, name ->
    array in the library's order."""
    by_name: dict[str, Array] = {}
    for param in parameters(config):
        parameter_scheme, tensors = quant.scheme_for(scheme, param.name), quant.stored(param, scheme)
        weight = weights[param.name].astype(np.float32)
        if len(tensors) == 1:
            arrays: Sequence[Array] = (weight.reshape(tensors[0].shape).astype(tensors[0].dtype),)
        else:
            packed = [
                schemes.pack(matrix, parameter_scheme)
                for matrix in weight.reshape(param.count, *param.matrix or ())
            ]
            arrays = [np.concatenate(parts) for parts in zip(*packed, strict=True)]
        by_name |= {tensor.name: array for tensor, array in zip(tensors, arrays, strict=True)}
    return by_name


def unpacked(config: ModelConfig, scheme: quant.Storage, stored: Mapping[str, Array]) -> dict[str, Floats]:
    """Returns parameter name -> its dequantized float32 values, from stored tensors."""
    by_name: dict[str, Floats] = {}
    for param in parameters(config):
        parts = [stored[tensor.name] for tensor in quant.stored(param, scheme)]
        by_name[param.name] = np.asarray(conversion.unpacked_parameter(param, scheme, parts)).reshape(
            param.shape
        )
    return by_name


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Floats]:
    """Returns parameter name -> random values, scaled so that products have about the magnitude of their
    inputs."""
    rng = np.random.default_rng(seed)
    by_name = {}
    for param in parameters(config):
        values = rng.standard_normal(param.shape).astype(np.float32)
        if len(param.shape) > 1:
            values /= np.sqrt(np.float32(param.shape[-1]))
        elif param.name.endswith("norm.weight"):
            values = 1 - config.norm.offset + 0.1 * values
        by_name[param.name] = values.astype(np.float32)
    return by_name


HERE = Path(__file__).parent
HOST = "host"


@dataclass(frozen=True)
class Golden:
    """A tiny checkpoint, and the logits that transformers computes with it."""

    config: ModelConfig
    weights: dict[str, Array]
    tokens: list[int]
    logits: Floats  # [tokens, vocab]
    context_window: int


def golden(variant: str) -> Golden:
    directory = HERE / "golden" / variant
    config = parsing.parse(json.loads((directory / "config.json").read_text()), variant)
    inputs, _ = _safetensors(directory / "model.safetensors")
    for name, other in models.aliases(config).items():
        inputs.setdefault(name, inputs.get(other, np.empty(0)))
    sources = parsing.tensor_names(config).sources.items()
    weights = {name: np.concatenate([inputs[part.tensor] for part in parts]) for name, parts in sources}
    actual, about = _safetensors(directory / "golden.safetensors")
    tokens = [int(token) for token in actual["tokens"]]
    return Golden(config, weights, tokens, actual["logits"], int(about["context_window"]))


def _safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Reads a safetensors file. Returns (tensor name -> array, bfloat16 converted to float32; metadata of the
    file).
    """
    data = path.read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:base])
    about = entries.pop("__metadata__", {})
    types = {"F32": "<f4", "I64": "<i8", "BF16": "<u2"}
    by_name: dict[str, Array] = {}
    for name, entry in entries.items():
        start, end = (base + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[start:end], types[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        by_name[name] = values
    return by_name, about


def compiled(
    area: pytest.TempPathFactory,
    config: ModelConfig,
    scheme: quant.Storage,
    target: str = HOST,
    context_window: int = 128,
    max_batch: int = 4,
    *,
    kv_cache: str = "auto",
) -> Path:
    """Returns the directory with the library of a model, which is compiled once in a run of the tests."""
    limits: dict[str, Json] = {"context_window": context_window, "prefill_chunk": 64}
    limits["max_batch"] = max_batch
    params: dict[str, Json] = {
        "scheme": cast(Json, quant.to_json(scheme)),
        "target": cast(Json, targets.to_json(presets.resolve(target))),
        "limits": limits,
        "kv_cache": kv_cache,
    }
    data = models.to_json(config)
    root = area.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else area.getbasetemp()
    place = root / "libraries" / canon.digest("test/1", [params, data])
    place.parent.mkdir(exist_ok=True)
    claim = place.with_suffix(".claim")
    try:
        claim.mkdir()
    except FileExistsError:
        _wait_for(place)
        return place
    part = area.mktemp("library")
    (part / "in").mkdir()
    (part / "in" / "config.json").write_text(json.dumps(data))
    (part / "out").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        compiler_process.preloaded(patch)
        compile_library(params, {"config": part / "in"}, part / "out")
    (part / "out").rename(place)
    return place


def _wait_for(place: Path) -> None:
    """Waits until the directory `place` exists, to which another test process writes a compiled library.
    Raises AssertionError after 200 seconds."""
    for _ in range(2000):
        if place.is_dir():
            return
        time.sleep(0.1)
    raise AssertionError(f"{place} was claimed by another test process, which failed to compile it")


@dataclass
class Session:
    """A compiled library that is loaded with its weights and a KV cache, for tests."""

    path: Path
    stored: Mapping[str, Array]
    num_pages: int = 64
    dirty: bool = True
    """True to fill the KV cache with NaN before its first use."""
    lengths: dict[int, int] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vm = _ffi().load_module(str(self.path.absolute()))["vm_load_executable"]()
        vm["vm_initialization"](1, 0, 2)
        self.vm = vm
        self.params = _ffi().convert([tensor(array) for array in self.stored.values()])
        self.cache = vm["create_paged_kv_cache"](_ffi().Shape([self.num_pages]))
        if self.dirty:
            np.from_dlpack(self.cache).view(np.uint8)[...] = 0xFF  # NaN in all floats, and so in scales
        order = np.random.default_rng(5).permutation(self.num_pages)
        self.free = [int(page) for page in order]

    def _grow(self, sequence: int, count: int) -> range:
        """Allocates pages for `count` more tokens of a sequence, and returns the tokens' positions."""
        start = self.lengths.get(sequence, 0)
        self.lengths[sequence] = start + count
        pages = self.pages.setdefault(sequence, [])
        while len(pages) * PAGE < start + count:
            pages.append(self.free.pop())
        return range(start, start + count)

    def _batch(self, parts: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
        """Returns argument name -> tensor for the arguments of a library function that describe a batch:
        positions, KV cache slots and pages of new tokens. parts: (number of a sequence, its new token ids),
        for which pages are reserved."""
        positions, slots, q_indptr, page_indptr, table = [], [], [0], [0], []
        for sequence, tokens in parts:
            where = self._grow(sequence, len(tokens))
            pages = self.pages[sequence]
            positions += list(where)
            slots += [pages[position // PAGE] * PAGE + position % PAGE for position in where]
            table += pages
            q_indptr.append(len(positions))
            page_indptr.append(len(table))
        lengths = [self.lengths[sequence] for sequence, _ in parts]
        arrays = (positions, slots, q_indptr, page_indptr, table, lengths)
        tensors = (self.cache, *(tensor(np.array(array, np.int32)) for array in arrays))
        names = [argument.name for argument in abi.BATCH]
        return {**dict(zip(names, tensors, strict=True)), "params": self.params}

    def embed(self, tokens: Sequence[int]) -> Floats:
        embedded = self.vm[abi.EMBED.name](tensor(np.array(tokens, np.int32)), self.params)
        return np.asarray(np.from_dlpack(embedded), np.float32)

    def step_arguments(
        self, parts: Sequence[tuple[int, Sequence[int]]], rows: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Returns argument name -> tensor for a call of the library function `step_prefill` in which no token
        is sampled. parts: (number of a sequence, its new token ids); rows: indices of the tokens whose logits
        are computed, counted over all parts (default: every token)."""
        tokens = [token for _, new in parts for token in new]
        chosen = np.arange(len(tokens)) if rows is None else np.array(rows)
        return {
            "tokens": tensor(np.array(tokens, np.int32)),
            "logit_positions": tensor(chosen.astype(np.int32)),
            "sampling_params": tensor(np.array([abi.SKIP] * len(chosen), abi.SAMPLING_DTYPE)),
            "sampled": tensor(np.zeros(len(chosen), np.int32)),
            "masks": tensor(np.zeros((0, abi.MASK_BITS + 1), np.int32)),
            **self._batch(parts),
        }

    def _logits(self, function: abi.Function, arguments: Mapping[str, Any]) -> Floats:
        logits = self.vm[function.name](*function.ordered(arguments))
        return np.array(np.from_dlpack(logits)[0], np.float32)

    def prefill(self, *parts: tuple[int, Sequence[int]], rows: Sequence[int] | None = None) -> Floats:
        """Returns the logits [rows, vocab] of new tokens of some sequences, by the kernels for prompts."""
        return self._logits(abi.STEP_PREFILL, self.step_arguments(parts, rows))

    def decode(self, *parts: tuple[int, int]) -> Floats:
        """Returns the logits [sequences, vocab] of one new token of each sequence."""
        arguments = self.step_arguments([(sequence, [token]) for sequence, token in parts])
        return self._logits(abi.STEP, {**arguments, "forks": tensor(np.zeros((0, 3), np.int32))})

    def hidden(self, *parts: tuple[int, Sequence[int]]) -> Floats:
        """Returns the hidden states [tokens, hidden] of new tokens after the last norm, from which logits
        would be computed. parts: (number of a sequence, its new token ids)."""
        inputs = tensor(self.embed([token for _, new in parts for token in new])[None])
        arguments = abi.HIDDEN_STATES.ordered({"input_embeds": inputs, **self._batch(parts)})
        return np.array(np.from_dlpack(self.vm[abi.HIDDEN_STATES.name](*arguments))[0], np.float32)
