"""Reads and checks a request to compile a library: model, quantization scheme, target and limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from mlcbuild_format.limits import Limits

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.errors import CompileError
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Storage
from mlcbuild.quant.choice import scheme_of
from mlcbuild.targets import target as targets
from mlcbuild.targets.target import Target


@dataclass(frozen=True)
class CompileRequest:
    """A request to compile a library for a model: the model's config, the quantization scheme, target, limits
    and the type of the KV cache. These and the versions of tools determine the bytes of its code."""

    config: ModelConfig
    scheme: Storage
    target: Target
    limits: Limits
    kv_cache: str = "auto"
    """How the KV cache stores keys and values: "auto" for the floating point type of the quantization scheme,
    "int8" for 8-bit integers with scales."""

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> CompileRequest:
        """Returns the CompileRequest that a JSON object describes: the inverse of to_json. Raises
        CheckpointError for an invalid config, UsageError for an invalid scheme, KeyError or TypeError for a
        missing field. The limits are not checked."""
        return cls(
            models.from_json(data["config"]),
            quant.from_json(data["scheme"]),
            targets.from_json(cast("Mapping[str, Json]", data["target"])),
            Limits(**cast("Mapping[str, int]", data["limits"])),
            cast(str, data.get("kv_cache", "auto")),
        )

    def to_json(self) -> dict[str, Json]:
        return {
            "config": models.to_json(self.config),
            "scheme": quant.to_json(self.scheme),
            "target": targets.to_json(self.target),
            "limits": cast("dict[str, Json]", asdict(self.limits)),
            "kv_cache": self.kv_cache,
        }


def read_request(params: Mapping[str, Json], inputs: Mapping[str, Path]) -> CompileRequest:
    """Returns the request that the parameters of a build step describe, after checking it.

    params: target, limits and kv_cache ("auto" if missing) as JSON (a null context_window stands for the
    model's maximum), and the scheme as quant.choice.scheme_of reads it. inputs["config"]: directory with the
    converted config.json. Raises CompileError with all problems of limits, target, KV cache and the scheme's
    overrides for single weights, CheckpointError for an invalid config."""
    config = models.from_json(json.loads((inputs["config"] / "config.json").read_text()))
    request = CompileRequest(
        config,
        scheme_of(params, inputs),
        targets.from_json(cast("Mapping[str, Json]", params["target"])),
        _limits(config, cast("Mapping[str, int | None]", params["limits"])),
        cast(str, params.get("kv_cache", "auto")),
    )
    _check(request)
    return request


def _limits(config: ModelConfig, requested: Mapping[str, int | None]) -> Limits:
    """Returns the limits of a library for a model. requested: name of a limit (context_window, prefill_chunk,
    max_batch; none may be missing) -> value; a null context_window becomes the model's maximum, any other
    null 0, which `_check` rejects. The returned prefill_chunk is at most the context window. The limits are
    not checked here."""
    window = models.context_window(config, requested["context_window"])
    chunk, max_batch = requested["prefill_chunk"] or 0, requested["max_batch"] or 0
    return Limits(window, min(chunk, window), max_batch)


def _check(request: CompileRequest) -> None:
    """Raises one CompileError with all problems of a request: a limit below 1, a context window beyond the
    model's positions, an int8 KV cache that the model's attention does not allow, a shared library for a
    system without any, overrides of the scheme that match no weight, or only weights that earlier ones match.
    """
    config, limits, target = request.config, request.limits, request.target
    faults = [
        f"compile.{name} must be at least 1, found {value}"
        for name in ("context_window", "prefill_chunk", "max_batch")
        if (value := getattr(limits, name)) < 1
    ]
    if limits.context_window > config.max_position:
        faults.append(
            f"compile.context_window is {limits.context_window}, but the model was made for"
            f" {config.max_position} positions: use at most that"
        )
    if request.kv_cache == "int8" and (fault := models.int8_cache_fault(config)):
        faults.append(fault)
    if target.output == "shared" and target.system not in ("linux", "macos"):
        faults.append(f"a shared library for {target.triple} cannot be made: use `output: object`")
    faults += quant.check_overrides(request.scheme, models.parameters(config))
    if faults:
        raise CompileError("\n".join(faults))
