"""Reads MXFP4 checkpoints of gpt-oss: `<name>_blocks` [experts, outputs, inputs / 32, 16] and `<name>_scales`
[experts, outputs, inputs / 32], both bytes, stand for one tensor [experts, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.small_float_codes import Fp4Matrix
from mlcbuild.checkpoints.stored_parts import StoredParts, replaced

_GROUP = 32


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor for an MXFP4 checkpoint with one tensor NAME [experts, inputs, outputs], the
    matrices of all experts, in place of each pair of stored tensors NAME_blocks (codes) and NAME_scales; it
    is dequantized when it is read. Scales of activations and KV caches are left out, other tensors stay.
    settings: unused. Raises CheckpointError if one of a pair is missing or they do not fit together."""
    endings = ("_blocks", "_scales")
    marks = {name.rpartition(".")[2] for name in tensors if name.endswith(endings)}

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        others = {part: item for part, item in parts.tensors.items() if part not in marks}
        names = dict.fromkeys(part[: -len("_blocks")] for part in parts.tensors if part in marks)
        return {**others, **{name: _stack(parts, name) for name in names}}

    return replaced(tensors, marks, combine)


def _stack(parts: StoredParts, name: str) -> Tensor:
    blocks, scales = parts[f"{name}_blocks"], f"{name}_scales"
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2 or not blocks.size:
        raise parts.fault(
            f"must have {name}_blocks of U8 [experts, outputs, groups, 16], found {blocks.dtype} "
            f"{list(blocks.shape)}"
        )
    experts, outputs, groups, _ = blocks.shape
    scale = parts.check(scales, ("U8", "F8_E8M0"), (experts, outputs, groups))
    matrix = Fp4Matrix(blocks, scale, _GROUP * groups, _GROUP)
    shape = (experts, matrix.columns, outputs)
    stack = parts.computed(shape, matrix.load, "MXFP4", matrix.unpack, name=name)
    return replace(stack, by_columns=True)
