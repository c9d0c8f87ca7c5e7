"""Compiles the library of a model for this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from mlcbuild import models, quant
from mlcbuild.canon import Json
from mlcbuild.compiler.cpu.action import compile_library
from mlcbuild.models import ModelConfig
from mlcbuild.targets import presets
from mlcbuild.targets import target as targets
from tests.libharness import Session, pack
from tests.schemes import SCHEMES

WINDOW = 64


def compiled(area: Path, config: ModelConfig, weights: Any) -> Session:
    """Compiles a model's library without quantization (scheme q0f32: float32 weights) and with a context
    window of 64 tokens below the directory `area`, and returns a session that runs it with these weights."""
    scheme = SCHEMES["q0f32"]
    limits: dict[str, Json] = {"context_window": WINDOW, "prefill_chunk": WINDOW, "max_batch": 2}
    params: dict[str, Json] = {
        "scheme": cast(Json, quant.to_json(scheme)),
        "target": cast(Json, targets.to_json(presets.resolve("host"))),
        "limits": limits,
    }
    source, out = area / "library-in", area / "library"
    source.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(models.to_json(config)))
    compile_library(params, {"config": source}, out)
    return Session(out / "model.so", pack(config, scheme, weights))
