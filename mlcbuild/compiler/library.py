"""Compiles a model's library: object files with its machine code, and library.json with its metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from mlcbuild_format import versions as format_versions
from tvm import IRModule, relax
from tvm.ir import StringImm

from mlcbuild.canon import Json
from mlcbuild.compiler import phases, versions
from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.compiler.library_metadata import LibraryCode, LibraryMemory, describe
from mlcbuild.compiler.program import functions
from mlcbuild.compiler.program.decoder import Decoder
from mlcbuild.compiler.program.ops import Ops
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Storage
from mlcbuild.targets.target import Target

MakeOps = Callable[[ModelConfig, Storage, Target, str], Ops]
"""Constructor of a backend: function of (model, quantization scheme, target, storage of the KV cache, such as
"int8") that returns an Ops, whose methods emit the model's operations, such as attention, for the target's
device.
"""


def build(data: Mapping[str, Json], directory: Path, mark: phases.Mark, make_ops: MakeOps) -> list[Path]:
    """Compiles a model's library, writes object files and library.json into `directory`, and returns the
    paths of the object files.

    data: a CompileRequest (model, scheme, target, limits) as JSON. mark: callback that receives the name of
    each phase when it starts. make_ops: constructor of the device's operations. Raises SetupError if the
    installed TVM contains another version of LLVM than cache keys assume, CompileError if a compiler pass
    yields an ill-formed module or the device lacks a kernel; TVM's exceptions pass unchanged.
    """
    versions.check()
    request = CompileRequest.from_json(data)
    mark("choose kernels")
    ops = make_ops(request.config, request.scheme, request.target, request.kv_cache)
    decoder = Decoder(ops, request.limits)
    mod = phases.run(functions.build(decoder), ops.plan, ops.target, mark)
    text = describe(request, _code(decoder, estimate(decoder, mod)))
    (directory / "library.json").write_text(text + "\n")
    mod = phases.run(_with_metadata(mod, text), ops.lower, ops.target, mark)
    return phases.objects(mod, ops.target, directory, mark, ops.kernels)


def _code(decoder: Decoder, memory: LibraryMemory) -> LibraryCode:
    params = [(item.name, item.shape, item.dtype, item.layout) for item in decoder.tensors]
    kernels, fallbacks = decoder.ops.kernel_names()
    return LibraryCode(format_versions.LIBRARY, params, versions.compiler(), memory, kernels, fallbacks)


def estimate(decoder: Decoder, mod: IRModule) -> LibraryMemory:
    """Returns the memory that a compiled library needs for its limits on batch and context, in bytes:
    weights, KV cache, and what calls allocate in addition. mod: the library's Relax module after memory
    planning."""
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
