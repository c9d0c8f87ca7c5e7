"""Builds the library of a GPU: its program, the text of its kernels, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from mlcbuild_format import program_json
from mlcbuild_format.fields import FieldError
from mlcbuild_format.limits import Limits
from mlcbuild_format.program import FORMAT, PROGRAM, Program, check

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler import versions
from mlcbuild.compiler.child import METADATA
from mlcbuild.compiler.gpu.launch_plan import GpuDecoder
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.support import unsupported
from mlcbuild.errors import CompileError


def build(data: Mapping[str, Json], directory: Path, mark: Callable[[str], None]) -> list[Path]:
    """Writes program.json, kernels and library.json into `directory`, and returns the paths of the first two.
    data: config, scheme, target and limits as JSON; mark: called with the name of each phase. Raises
    CompileError.
    """
    versions.check()
    config, scheme = models.from_json(data["config"]), quant.from_json(data["scheme"])
    limits = Limits(**cast("Mapping[str, int]", data["limits"]))
    faults = unsupported(config)
    if faults:
        raise CompileError("\n".join(faults))
    mark("make kernels")
    builder = LaunchBuilder(config, scheme, limits)
    program = GpuDecoder(builder).emit()
    check_guaranteed(program, limits)
    (directory / "kernels").mkdir()
    for name, text in builder.emitter.texts.items():
        (directory / name).write_text(text)
    (directory / PROGRAM).write_bytes(program_json.to_bytes(program))
    metadata: dict[str, Json] = {
        "format": FORMAT,
        "config": models.to_json(config),
        "scheme": quant.describe(scheme),
        "target": data["target"],
        "limits": cast("dict[str, Json]", asdict(limits)),
        "params": cast(Json, [list(param) for param in program.params]),
        "signature": program.signature,
        "tools": cast("dict[str, Json]", versions.compiler()),
        "kernels": {name: shader.file for name, shader in sorted(program.kernels.items())},
        "fallbacks": {},
        "memory": cast("dict[str, Json]", memory(program, limits)),
    }
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    (directory / METADATA).write_text(text + "\n")
    return [directory / name for name in (PROGRAM, *sorted(builder.emitter.texts))]


def check_guaranteed(program: Program, limits: Limits) -> None:
    """Raises CompileError unless every device with WebGPU's guaranteed limits can run the program, with pages
    for one sequence.
    """
    try:
        check(program_json.parse(program_json.to_json(program)), min(limits.pages, limits.sequence_pages))
    except FieldError as error:
        raise CompileError(
            f"the program exceeds what every GPU can do: {error}; use a smaller compile.context_window or"
            " compile.prefill_chunk"
        ) from None


def memory(program: Program, limits: Limits) -> dict[str, int]:
    """Returns purpose of a device's buffers -> bytes: weights, one page over all layers, the cache, and the
    rest.
    """
    buffers = program.buffer_bytes(limits.pages)
    cache = sum(buffers[name] for name, own in program.buffers.items() if own.kind == "cache")
    return {
        "weights": sum(program.param_bytes().values()),
        "kv_page": cache // limits.pages,
        "kv_cache": cache,
        "workspace": sum(buffers.values()) - cache,
    }
