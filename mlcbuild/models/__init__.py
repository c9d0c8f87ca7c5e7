"""Models as data: what a checkpoint's config.json means, and what its tensors are called."""

from mlcbuild.models.config import ModelConfig, cached_values, context_window, parameters
from mlcbuild.models.experts import Clamp, Experts, Router
from mlcbuild.models.layers import (
    Alibi,
    Attention,
    Dense,
    LayerNorm,
    LayerSpec,
    Norm,
    Norms,
    QueryScale,
    RmsNorm,
    Rope,
    frequencies,
)
from mlcbuild.models.param import Activation, Param
from mlcbuild.models.serial import config_digest, from_json, to_json
from mlcbuild.models.tensor_names import Piece, TensorNames, aliases, surplus

__all__ = [
    "Activation",
    "Alibi",
    "Attention",
    "Clamp",
    "Dense",
    "Experts",
    "LayerNorm",
    "LayerSpec",
    "ModelConfig",
    "Norm",
    "Norms",
    "Param",
    "Piece",
    "QueryScale",
    "RmsNorm",
    "Rope",
    "Router",
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
