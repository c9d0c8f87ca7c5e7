"""Reads checkpoints of NVIDIA's Model Optimizer: FP8 with `weight_scale`, or NVFP4, whose weights are
multiplied by a `weight_scale` for 16 columns and a `weight_scale_2` for the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.quantized.compressed_tensors_reader import fp4_weight
from mlcbuild.checkpoints.scaled_floats import scaled
from mlcbuild.checkpoints.stored_parts import StoredParts, replaced

_USED = ("weight", "weight_scale", "weight_scale_2")


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of a Model Optimizer checkpoint with one tensor, `<module>.weight`, in place of
    the parts of each quantized matrix; it is dequantized when its rows are read. Scales of activations and KV
    caches are left out, other tensors stay. settings: unused. Raises CheckpointError for parts that are
    missing or do not fit together."""

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        others = {part: item for part, item in parts.tensors.items() if part not in _USED}
        if parts["weight"].dtype == "U8":
            # Without weight_scale_2 these would be MXFP4 weights, which Model Optimizer does not write.
            parts["weight_scale_2"]
            weight = fp4_weight(parts, "weight", "weight_scale_2", divides=False)
        else:
            weight = scaled(parts, "weight_scale")
        return {"weight": weight, **others}

    return replaced(tensors, ("weight_scale",), combine)
