"""Models as data: reads a checkpoint's config.json into layers, and names the checkpoint's tensors."""

from mlcbuild.models.config import (
    ModelConfig,
    cached_bytes,
    context_window,
    int8_cache_fault,
    parameters,
)
from mlcbuild.models.experts import Clamp, Experts, Router
from mlcbuild.models.latent import LatentAttention
from mlcbuild.models.layers import (
    Alibi,
    Attention,
    Dense,
    LayerNorm,
    LayerSpec,
    Mixer,
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
    "LatentAttention",
    "LayerNorm",
    "LayerSpec",
    "Mixer",
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
    "cached_bytes",
    "config_digest",
    "context_window",
    "frequencies",
    "from_json",
    "int8_cache_fault",
    "parameters",
    "surplus",
    "to_json",
]
