"""Models as data: what a checkpoint's config.json means, and what its tensors are called."""

from mlcbuild.models.config import ModelConfig, cached_values, context_window, parameters
from mlcbuild.models.layers import (
    Activation,
    Attention,
    Dense,
    LayerSpec,
    Norms,
    Param,
    RmsNorm,
    Rope,
    frequencies,
)
from mlcbuild.models.serial import config_digest, from_json, to_json
from mlcbuild.models.tensor_names import Piece, TensorNames, aliases, surplus

__all__ = [
    "Activation",
    "Attention",
    "Dense",
    "LayerSpec",
    "ModelConfig",
    "Norms",
    "Param",
    "Piece",
    "RmsNorm",
    "Rope",
    "TensorNames",
    "aliases",
    "cached_values",
    "config_digest",
    "context_window",
    "frequencies",
    "from_json",
    "parameters",
    "surplus",
    "to_json",
]
