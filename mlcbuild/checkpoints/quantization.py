"""Chooses the module that reads the quantized weights of a checkpoint, by the quantization_config in its
config.json.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlcbuild_format.fields import printable

from mlcbuild.checkpoints import quantized
from mlcbuild.errors import CheckpointError, did_you_mean

_ENDING = "_reader"


@cache
def methods() -> tuple[str, ...]:
    """Returns the sorted names of all quantization methods, which are the file names below quantized/ without
    `_reader`.
    """
    modules = pkgutil.iter_modules(quantized.__path__)
    return tuple(sorted(module.name.removesuffix(_ENDING) for module in modules))


def module_of(method: str) -> str:
    """Returns the dotted name of the module that reads weights of a quantization method, without
    a check that the module exists.
    """
    return f"{quantized.__name__}.{method}{_ENDING}"


def method_of(settings: object, place: str) -> str:
    """Returns the name of the quantization method that a quantization_config states, in lower case with `_`
    for `-`; "mlx" if it has no method but bits and group_size. place: the beginning of error messages. Raises
    CheckpointError if it is not an object or states no supported method.
    """
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{place}: quantization_config: must be an object, found {_shown(settings)}")
    name = settings.get("quant_method")
    if name is None and {"bits", "group_size"} <= settings.keys():
        name = "mlx"  # MLX writes no method.
    method = name.replace("-", "_").lower() if isinstance(name, str) else ""
    if method not in methods():
        hint = did_you_mean(method, methods())
        raise CheckpointError(
            f"{place}: quantization_config: weights of the method {_shown(name)} cannot be read; {hint}, or "
            "use the original checkpoint"
        )
    return method


def read_settings(config: Path) -> Mapping[str, Any] | None:
    """Returns the quantization_config of a checkpoint, which the config step stored; None if the weights
    are not quantized. config: the directory that this step wrote.
    """
    path = config / "quantization.json"
    if not path.exists():
        return None
    settings: Mapping[str, Any] = json.loads(path.read_bytes())
    return settings


def _shown(value: object) -> str:
    return printable(str(value)[:60]) if isinstance(value, str) else f"{str(value)[:60]!r}"
