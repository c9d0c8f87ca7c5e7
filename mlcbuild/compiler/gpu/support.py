"""Lists the building blocks of models for which GPU kernels exist. It imports no TVM, because planning a
build imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from mlcbuild.models import LatentAttention, LayerSpec, ModelConfig

FIELDS: Mapping[str, tuple[str, ...]] = {
    "ModelConfig": (
        *("family", "vocab_size", "hidden_size", "max_position", "layers", "ropes", "norm"),
        *("tie_embeddings", "embedding_scale", "logit_softcap", "logit_scale", "head_bias"),
        *("embedding_norm", "learned_positions", "position_offset"),
    ),
    "Rope": (
        *("dim", "inv_freq", "attention_factor", "inv_freq_long", "long_factor"),
        *("original_max_position", "query_scale"),
    ),
    "LayerSpec": ("mixer", "feed_forward", "norms", "residual", "residual_scale"),
    "Attention": (
        *("heads", "kv_heads", "head_dim", "scale", "rope", "window", "qkv_bias", "output_bias"),
        *("qk_norm", "softcap", "qk_norm_span", "qk_norm_last", "clip", "alibi", "sinks"),
    ),
    "LatentAttention": (
        *("heads", "latent", "head_dim", "rope_dim", "value_dim", "scale", "eps", "query_latent", "rope"),
        *("window", "bias", "output_bias"),
    ),
    "Dense": ("size", "activation", "bias", "gated"),
    "Experts": (
        *("count", "chosen", "size", "activation", "router", "bias", "clamp", "shared_size", "shared_gate"),
    ),
    "Norms": ("before", "after"),
    "RmsNorm": ("eps", "offset"),
    "LayerNorm": ("eps", "offset", "weight", "bias"),
}
"""Name of a class in mlcbuild.models -> names of its fields that GPU kernels support. All other fields must
have their default value, and models with other classes of blocks are not supported."""
_MAX_HEAD_DIM = 256


def unsupported(config: ModelConfig) -> list[str]:
    """Returns an error message for each kind of building block of a model that has no GPU kernels; [] if the
    model can run on a GPU.
    """
    blocks: dict[str, None] = {}
    for part in (config, *config.ropes, config.norm, config.embedding_norm):
        blocks |= dict.fromkeys(_unsupported(part))
    for layer in dict.fromkeys(config.layers):
        blocks |= dict.fromkeys(_unsupported_in_layer(layer))
    return [
        f"the device 'webgpu' has no kernels for {block}: build this model for a CPU target"
        for block in blocks
    ]


def _unsupported_in_layer(layer: LayerSpec) -> Iterator[str]:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    qk_norm = getattr(mixer, "qk_norm", None)
    parts = (layer, mixer, feed_forward, layer.norms, layer.norms.before, layer.norms.after, qk_norm)
    for part in parts:
        yield from _unsupported(part)
    if isinstance(mixer, LatentAttention):
        if mixer.cached % 2:
            yield f"latents and shared keys of {mixer.cached} numbers, which must be even"
        return
    head_dim = getattr(mixer, "head_dim", 2)
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        yield f"heads of {head_dim} dimensions, which must be even and at most {_MAX_HEAD_DIM}"


def _unsupported(part: Any) -> Iterator[str]:
    if part is None:
        return
    name = type(part).__name__
    if name not in FIELDS:
        yield f"the block '{name}'"
        return
    for field in fields(part):
        value = getattr(part, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in FIELDS[name] and value != default:
            yield f"the block '{name}' with {field.name} = {value!r}"
