"""Builds GPU bundles from configs and weights for tests, and loads them on this machine's GPU adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from mlcbuild_format.bundle import Manifest, Memory, Model
from mlcbuild_format.limits import Limits
from mlcbuild_runtime.devices import gpu
from mlcbuild_runtime.devices.gpu import GpuExecutor
from numpy.typing import NDArray
from safetensors import numpy

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler.gpu.gpu_action import compile_library
from mlcbuild.models import ModelConfig
from mlcbuild.targets import gpus, presets
from mlcbuild.targets import target as targets
from tests import compiler_process
from tests.libharness import pack

LIMITS = {"context_window": 128, "prefill_chunk": 64, "max_batch": 4}


@cache
def why_not() -> str | None:
    return gpus.why_not()


def needs_adapter() -> None:
    """Skips the test if this machine has no GPU adapter, not even one in software."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def compiled(directory: Path, config: ModelConfig, scheme: quant.Storage, **limits: int) -> Path:
    """Compiles a model for GPUs, and returns the directory with its program. limits: of the library, such as
    its context window."""
    for name in ("in", "out"):
        (directory / name).mkdir(parents=True)
    (directory / "in" / "config.json").write_text(json.dumps(models.to_json(config)))
    params: dict[str, Json] = {
        "scheme": quant.to_json(scheme),
        "target": targets.to_json(presets.resolve("webgpu")),
        "limits": cast(Json, {**LIMITS, **limits}),
    }
    with pytest.MonkeyPatch.context() as patch:
        compiler_process.preloaded(patch)
        compile_library(params, {"config": directory / "in"}, directory / "out")
    return directory / "out"


def manifest(library: Path) -> Manifest:
    about: Any = json.loads((library / "library.json").read_text())
    parts = {key: about["memory"][key] for key in ("weights", "kv_cache", "workspace")}
    return Manifest(
        name="test",
        model=Model("test", about["config"]["family"], about["config"]),
        scheme=about["scheme"],
        target=about["target"],
        limits=Limits(**about["limits"]),
        library="program.json",
        weights=("weights.safetensors",),
        signature=about["signature"],
        files={},
        memory=Memory(**parts, total=sum(parts.values())),
    )


def loaded(
    library: Path, config: ModelConfig, scheme: quant.Storage, weights: Mapping[str, NDArray[Any]]
) -> GpuExecutor:
    """Writes the weights of a compiled GPU model, given by parameter name, and returns its executor."""
    about = manifest(library)
    metadata = {"format": "mlcbuild-weights/1", "signature": about.signature, "scheme": scheme.name}
    numpy.save_file(pack(config, scheme, weights), library / "weights.safetensors", metadata)
    return gpu.load(library, about, None, None)
