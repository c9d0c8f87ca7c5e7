"""Models as data: what a checkpoint's config.json means, and what its tensors are called."""

from mlcbuild.models.config import (
    Activation,
    ModelConfig,
    Param,
    Rope,
    context_window,
    frequencies,
    parameters,
)
from mlcbuild.models.serial import config_digest, from_json, to_json
from mlcbuild.models.tensor_names import TensorNames, aliases, piece_rows, surplus

__all__ = [
    "Activation",
    "ModelConfig",
    "Param",
    "Rope",
    "TensorNames",
    "aliases",
    "config_digest",
    "context_window",
    "frequencies",
    "from_json",
    "parameters",
    "piece_rows",
    "surplus",
    "to_json",
]
