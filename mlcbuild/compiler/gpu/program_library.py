"""Builds the library for a GPU: its program, the source texts of its kernels, and its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlcbuild_format import program_json
from mlcbuild_format.fields import FieldError
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import FORMAT, PROGRAM, Program, check

from mlcbuild.canon import Json
from mlcbuild.compiler import versions
from mlcbuild.compiler.child import METADATA
from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.compiler.gpu.launch_plan import GpuDecoder
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.support import unsupported
from mlcbuild.compiler.library_metadata import LibraryCode, LibraryMemory, describe
from mlcbuild.errors import CompileError


def build(data: Mapping[str, Json], directory: Path, mark: Callable[[str], None]) -> list[Path]:
    """Compiles a model for a GPU, writes program.json, kernels and library.json into `directory`, and returns
    the paths of program.json and the kernels. data: a CompileRequest (model, scheme, target, limits) as JSON;
    mark: callback that receives the name of each phase. Raises CompileError if the model has blocks without
    GPU kernels, if the KV cache is to be stored as int8, or if a device with only WebGPU's guaranteed limits
    could not run the program, and SetupError if the installed TVM has another version of LLVM than cache keys
    assume; TVM's exceptions pass unchanged."""
    versions.check()
    request = CompileRequest.from_json(data)
    faults = unsupported(request.config)
    if request.kv_cache != "auto":
        faults = [*faults, f"compile.kv_cache is {request.kv_cache}, which only CPUs have: leave it out"]
    if faults:
        raise CompileError("\n".join(faults))
    mark("make kernels")
    builder = LaunchBuilder(request.config, request.scheme, request.limits)
    program = GpuDecoder(builder).emit()
    check_guaranteed(program, request.limits)
    (directory / "kernels").mkdir()
    for name, text in builder.emitter.texts.items():
        (directory / name).write_text(text)
    (directory / PROGRAM).write_bytes(program_json.to_bytes(program))
    kernels = {name: shader.file for name, shader in program.kernels.items()}
    needed = memory(program, request.limits)
    code = LibraryCode(FORMAT, program.params, versions.compiler(), needed, kernels, fallbacks={})
    (directory / METADATA).write_text(describe(request, code) + "\n")
    return [directory / name for name in (PROGRAM, *sorted(builder.emitter.texts))]


def check_guaranteed(program: Program, limits: Limits) -> None:
    """Raises CompileError if a GPU program exceeds WebGPU's guaranteed limits, such as the bytes of one
    buffer or the storage buffers of a kernel, with a KV cache for one sequence of context_window tokens. The
    total memory is not checked."""
    try:
        check(program_json.parse(program_json.to_json(program)), min(limits.pages, limits.sequence_pages))
    except FieldError as error:
        raise CompileError(
            f"the program exceeds what every GPU can do: {error}; use a smaller compile.context_window or"
            " compile.prefill_chunk"
        ) from None


def memory(program: Program, limits: Limits) -> LibraryMemory:
    """Returns a LibraryMemory, the bytes that a GPU program needs on a device: weights, KV cache for
    max_batch sequences of context_window tokens, one page of it, and all other buffers."""
    buffers = program.buffer_bytes(limits.pages)
    cache = sum(buffers[name] for name, buffer in program.buffers.items() if buffer.kind == "cache")
    return LibraryMemory(
        weights=sum(program.param_bytes().values()),
        kv_page=cache // limits.pages,
        kv_cache=cache,
        workspace=sum(buffers.values()) - cache,
    )
