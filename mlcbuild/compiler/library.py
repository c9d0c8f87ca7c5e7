"""Compiles a library: its program, its machine code and its metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
from mlcbuild_format import versions as format_versions
from mlcbuild_format.limits import Limits
from mlcbuild_format.signature import signature
from tvm import IRModule, relax
from tvm.ir import StringImm

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler import phases, versions
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.compiler.program.ops import Ops
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Storage
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class LibraryMemory:
    """The memory, in bytes, that a library needs when it runs."""

    weights: int
    kv_page: int
    """Bytes of one page of the KV cache over all layers."""
    kv_cache: int
    """Bytes of the KV cache for max_batch sequences of context_window tokens each."""
    workspace: int
    """Maximum bytes of the buffers between kernels, with the logits of max_batch rows, and of the scratch
    buffers of a kernel on one thread. They are allocated once and kept.
    """


@dataclass(frozen=True)
class CompileRequest:
    """Everything that determines the bytes of a library."""

    config: ModelConfig
    scheme: Storage
    target: Target
    limits: Limits

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> CompileRequest:
        return cls(
            models.from_json(data["config"]),
            quant.from_json(data["scheme"]),
            targets.from_json(cast("Mapping[str, Json]", data["target"])),
            Limits(**cast("Mapping[str, int]", data["limits"])),
        )


MakeOps = Callable[[ModelConfig, Storage, Target], Ops]
"""Constructor of a backend: function of (model, scheme, target) that returns the operations of the target's
device.
"""


def build(data: Mapping[str, Json], directory: Path, mark: phases.Mark, make_ops: MakeOps) -> list[Path]:
    """Compiles a request, writes its object files and library.json into `directory`, and returns the object
    files. data: a CompileRequest as JSON; mark: called with the name of each phase.
    """
    versions.check()
    request = CompileRequest.from_json(data)
    mark("choose kernels")
    ops = make_ops(request.config, request.scheme, request.target)
    decoder = Decoder(ops, request.limits)
    mod = phases.run(functions.build(decoder), ops.plan, ops.target, mark)
    metadata = describe(request, decoder, estimate(decoder, mod))
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    (directory / "library.json").write_text(text + "\n")
    mod = phases.run(_with_metadata(mod, text), ops.lower, ops.target, mark)
    return phases.objects(mod, ops.target, directory, mark, ops.kernels)


def describe(request: CompileRequest, decoder: Decoder, needed: LibraryMemory) -> dict[str, Json]:
    """Returns the metadata of a library, which is written to library.json and returned by the library's
    function `_metadata`.
    """
    params = [[item.name, list(item.shape), item.dtype, item.layout] for item in decoder.tensors]
    chosen, fallbacks = decoder.ops.kernel_names()
    return {
        "format": format_versions.LIBRARY,
        "config": models.to_json(request.config),
        "scheme": quant.describe(request.scheme),
        "target": targets.to_json(request.target),
        "limits": cast("dict[str, Json]", asdict(request.limits)),
        "params": cast(Json, params),
        "signature": signature((item.name, item.shape, item.dtype, item.layout) for item in decoder.tensors),
        "tools": cast("dict[str, Json]", versions.compiler()),
        "kernels": cast("dict[str, Json]", chosen),
        "fallbacks": cast("dict[str, Json]", fallbacks),
        "memory": cast("dict[str, Json]", asdict(needed)),
    }


def estimate(decoder: Decoder, mod: IRModule) -> LibraryMemory:
    """Returns the memory that a library needs. mod: the module whose buffers are planned for the library's
    limits.
    """
    page = decoder.ops.cache.page_bytes
    return LibraryMemory(
        weights=sum(math.prod(item.shape) * np.dtype(item.dtype).itemsize for item in decoder.tensors),
        kv_page=page,
        kv_cache=page * decoder.limits.pages,
        workspace=decoder.ops.workspace(decoder.limits, mod),
    )


def _with_metadata(mod: IRModule, text: str) -> IRModule:
    builder = relax.BlockBuilder(mod)
    with builder.function("_metadata", []):
        builder.emit_func_output(builder.emit(StringImm(text)))
    return builder.finalize()
