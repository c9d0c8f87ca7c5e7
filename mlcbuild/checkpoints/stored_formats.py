"""Chooses, for the quantization `as-is`, the smallest stored format of each parameter that holds a
checkpoint's values exactly, as the build step `formats/<model>/<quantization>`. For a checkpoint on this
machine there is no such step: the choice is made when the recipe is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from mlcbuild import models
from mlcbuild.canon import Json
from mlcbuild.checkpoints.checkpoint_kinds import checkpoint_path
from mlcbuild.checkpoints.checkpoint_views import views_of
from mlcbuild.checkpoints.exact_weights import read_tensor_names
from mlcbuild.checkpoints.mapping import PLAIN, locate
from mlcbuild.errors import CheckpointError
from mlcbuild.models import parameters
from mlcbuild.quant.as_is import AS_IS, UNQUANTIZED, resolved
from mlcbuild.quant.choice import CHOICE
from mlcbuild.quant.scheme import Scheme


def choose(params: Mapping[str, Json], inputs: Mapping[str, Path], out: Path) -> None:
    """Action of a build step: chooses for each parameter the smallest format that holds its values in
    inputs["checkpoint"] exactly, and writes the choice to choice.json in `out`: an object with "base" (the
    format of all other parameters), "name" (of the quantization) and "overrides" (pairs of a pattern of
    parameter names and a format).

    params["overrides"]: pairs (pattern of parameter names, name of a format), which decide first.
    inputs["config"]: the output of the config step. Raises CheckpointError for a checkpoint that is damaged
    or not quantized.
    """
    path, views = checkpoint_path(params, inputs), views_of(params, inputs)
    if views is PLAIN and path.suffix != ".gguf":
        raise CheckpointError(f"{path.name}: {UNQUANTIZED}")
    config = models.from_json(json.loads((inputs["config"] / "config.json").read_bytes()))
    sources = locate(path, config, read_tensor_names(inputs["config"]), views)
    listed = cast("list[tuple[str, str]]", params["overrides"])
    stated = tuple((pattern, Scheme(name, name)) for pattern, name in listed)
    scheme = resolved(
        replace(AS_IS, overrides=stated),
        {source.param.name: source.kinds for source in sources},
        parameters(config),
    )
    overrides: list[Json] = [[pattern, other.name] for pattern, other in scheme.overrides]
    choice: dict[str, Json] = {"base": scheme.format, "name": scheme.name, "overrides": overrides}
    out.mkdir(parents=True, exist_ok=True)
    (out / CHOICE).write_text(json.dumps(choice) + "\n", encoding="utf-8")
