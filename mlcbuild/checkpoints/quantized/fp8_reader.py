"""Reads FP8 checkpoints of DeepSeek, Qwen and Mistral: `weight` is multiplied by `weight_scale_inv` or by
`weight_scale`, which has one scale for the whole matrix, for each row or for each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.scaled_floats import scaled
from mlcbuild.checkpoints.stored_parts import StoredParts, replaced

_SCALES = ("weight_scale_inv", "weight_scale")


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of an FP8 checkpoint with one tensor, `<module>.weight`, whose rows are computed
    when they are read, in place of each matrix and its scales. Scales of activations and KV caches are left
    out; other tensors stay. settings: its quantization_config. Raises CheckpointError for parts that are
    missing or do not fit together, and for unsupported settings."""
    block = settings.get("weight_block_size")

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        scale = next(name for name in _SCALES if parts.get(name) is not None)
        others = {part: item for part, item in parts.tensors.items() if part not in ("weight", scale)}
        return {"weight": scaled(parts, scale, block), **others}

    return replaced(tensors, _SCALES, combine)
