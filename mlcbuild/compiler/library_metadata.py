"""Describes a compiled library as JSON, in library.json: model and scheme, the tensors that it takes, kernels
and memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from mlcbuild_format.signature import Tensor, signature

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler.compile_request import CompileRequest
from mlcbuild.targets import target as targets


@dataclass(frozen=True)
class LibraryMemory:
    """The memory, in bytes, that a compiled library needs when it runs."""

    weights: int
    kv_page: int
    """Number of bytes of one page (16 tokens) of the KV cache, over all layers."""
    kv_cache: int
    """Bytes of the KV cache for max_batch sequences of context_window tokens each."""
    workspace: int
    """Maximum number of bytes that the library's calls allocate in addition to weights and KV cache: the
    buffers between kernels, with logits for at most max_batch rows, and the scratch buffers that a kernel
    needs on one thread; those of further threads are not counted. The memory is allocated once and kept. For
    a GPU program, the bytes of all other buffers."""


@dataclass(frozen=True)
class LibraryCode:
    """The properties of compiled code that library.json lists: its format, parameter tensors, compiler
    versions, memory, kernels, and reasons for slow kernels.
    """

    format: str
    """Name and version of the format of library.json in one string, such as "mlcbuild-library/2" for CPUs and
    "mlcbuild-program/2" for GPU programs."""
    params: Sequence[Tensor]
    """The parameter tensors that the compiled library takes, as (name, shape, dtype, layout), in the order of
    its arguments."""
    tools: Mapping[str, str]
    """Name -> version of each program that produced the compiled code, such as apache-tvm and llvm."""
    memory: LibraryMemory
    kernels: Mapping[str, str]
    """Use of a kernel, such as a kind of matrix or attention -> name of the kernel; in GPU programs, name of
    a kernel -> its file.
    """
    fallbacks: Mapping[str, str]
    """Use of a kernel, such as a kind of matrix or attention -> the reason why its kernel is slower than the
    best; other uses are left out. It is empty for GPU programs.
    """


def describe(request: CompileRequest, code: LibraryCode) -> str:
    """Returns the text of library.json for a request and the properties of its compiled code: one line of
    JSON with sorted keys, without a line break at its end.
    """
    metadata: dict[str, Json] = {
        "format": code.format,
        "config": models.to_json(request.config),
        "scheme": quant.describe(request.scheme),
        "target": targets.to_json(request.target),
        "limits": cast("dict[str, Json]", asdict(request.limits)),
        "params": [[name, [*shape], dtype, layout] for name, shape, dtype, layout in code.params],
        "signature": signature(code.params),
        "tools": {**code.tools},
        "kernels": {**code.kernels},
        "fallbacks": {**code.fallbacks},
        "memory": cast("dict[str, Json]", asdict(code.memory)),
    }
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
