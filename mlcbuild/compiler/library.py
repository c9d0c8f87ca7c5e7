"""What a compiled library is: its program, its machine code, and what it says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from mlcbuild_runtime.signature import signature
from tvm import IRModule, relax
from tvm.ir import StringImm

from mlcbuild import models, quant, targets
from mlcbuild.canon import Json
from mlcbuild.compiler import functions, memory, pipeline, versions
from mlcbuild.compiler.decoder import Decoder
from mlcbuild.compiler.kernels.attention_plan import PART
from mlcbuild.compiler.kernels.cache import PAGE
from mlcbuild.compiler.kernels.isa import isa_for, tvm_target
from mlcbuild.compiler.layers import Parts
from mlcbuild.compiler.limits import Limits
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Scheme
from mlcbuild.targets import Target

FORMAT = "mlcbuild-library/1"


@dataclass(frozen=True)
class Request:
    """Everything that decides what a library is."""

    config: ModelConfig
    scheme: Scheme
    target: Target
    limits: Limits

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Request:
        limits = cast("Mapping[str, int]", data["limits"])
        return cls(
            models.from_json(data["config"]),
            quant.from_json(data["scheme"]),
            targets.from_json(cast("Mapping[str, Json]", data["target"])),
            Limits(limits["context_window"], limits["prefill_chunk"], limits["max_batch"]),
        )


def build(data: Mapping[str, Json], directory: Path, mark: pipeline.Mark) -> list[Path]:
    """Write the objects and library.json of a request (a Request as JSON) into `directory`."""
    versions.check()
    request = Request.from_json(data)
    target = tvm_target(request.target)
    mark("choose kernels")
    made = Decoder(Parts(request.config, request.scheme, isa_for(request.target)), request.limits)
    mod = pipeline.run(functions.build(made), pipeline.PLAN, target, mark)
    metadata = describe(request, made, memory.estimate(made, mod))
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    (directory / "library.json").write_text(text + "\n")
    mod = pipeline.run(_with_metadata(mod, text), pipeline.LOWER, target, mark)
    return pipeline.objects(mod, target, directory, mark)


def describe(request: Request, made: Decoder, needed: memory.Memory) -> dict[str, Json]:
    """What the library's `_metadata` function returns, and library.json holds."""
    params = [[item.name, list(item.shape), item.dtype, item.layout] for item in made.tensors]
    chosen, fallbacks = kernels(made)
    return {
        "format": FORMAT,
        "config": models.to_json(request.config),
        "scheme": quant.to_json(request.scheme),
        "target": targets.to_json(request.target),
        "limits": cast("dict[str, Json]", {**asdict(request.limits), "page_size": PAGE}),
        "params": cast(Json, params),
        "signature": signature((item.name, item.shape, item.dtype, item.layout) for item in made.tensors),
        "tools": cast("dict[str, Json]", versions.compiler()),
        "kernels": cast("dict[str, Json]", chosen),
        "fallbacks": cast("dict[str, Json]", fallbacks),
        "memory": cast("dict[str, Json]", asdict(needed)),
    }


def kernels(made: Decoder) -> tuple[dict[str, str], dict[str, str]]:
    """Kernel of each kind of matrix (by name without its layer, where all layers agree), and why slow ones
    were taken. Attention in decoding is cut into parts of so many tokens; prompts may have one on tiles."""
    isa = made.parts.isa.name
    chosen: dict[str, str] = {
        "attention": f"paged_attention.{isa}",
        "attention.decode": f"paged_attention_by_{PART * PAGE}.{isa}",
    }
    if made.parts.attending.asks:
        chosen["attention.prompt"] = f"paged_attention_bf16.{isa}"
    fallbacks: dict[str, str] = {}
    if reason := made.parts.attending.fallback:
        fallbacks["attention.prompt"] = reason
    for name, kernel, reason in made.products():
        kind = name.split(".", 2)[2] if name.startswith("layers.") else name
        key = kind if chosen.setdefault(kind, kernel) == kernel else name
        chosen[key] = kernel
        if reason:
            fallbacks[key] = reason
    return dict(sorted(chosen.items())), dict(sorted(fallbacks.items()))


def _with_metadata(mod: IRModule, text: str) -> IRModule:
    builder = relax.BlockBuilder(mod)
    with builder.function("_metadata", []):
        builder.emit_func_output(builder.emit(StringImm(text)))
    return builder.finalize()
