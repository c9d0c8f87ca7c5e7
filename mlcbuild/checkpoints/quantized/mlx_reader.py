"""Reads MLX checkpoints: codes packed along each row (`weight`), with `scales` and `biases` for each group of
columns.

A weight is code * scale + bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlcbuild_format.fields import describe, printable
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.bit_streams import Codes, unpacked
from mlcbuild.checkpoints.grouped_codes import GroupedMatrix
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, replaced
from mlcbuild.errors import CheckpointError

_FLOATS = ("F16", "BF16", "F32")
_BITS = (2, 3, 4, 5, 6, 8)
_USED = ("weight", "scales", "biases")


@dataclass(frozen=True)
class _Affine:
    """The checked tensors of one matrix in MLX's format (codes, scales, biases), and the number of bits of a
    code."""

    weight: Tensor
    scale: Tensor
    bias: Tensor
    bits: int

    def codes(self, reader: RowReader, first: int, count: int) -> Codes:
        return unpacked(reader.elements(self.weight, (first, first + count)), self.bits)

    def scales(self, reader: RowReader, first: int, count: int) -> Floats:
        return reader.values(self.scale, first, count)

    def biases(self, reader: RowReader, first: int, count: int) -> Floats:
        return reader.values(self.bias, first, count)


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of an MLX checkpoint with one tensor, `<module>.weight`, in place of the parts
    of each quantized matrix; it is dequantized when its rows are read. Scales of activations and KV caches
    are left out, other tensors stay. settings: the checkpoint's quantization_config, in which an object under
    a module's name overrides bits and group_size. Raises CheckpointError for parts that are missing or do not
    fit together, and for unsupported settings."""

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        module_settings = settings.get(parts.module)
        others = {part: item for part, item in parts.tensors.items() if part not in _USED}
        sizes = {**settings, **module_settings} if isinstance(module_settings, Mapping) else settings
        return {"weight": _weight(parts, sizes), **others}

    mode = str(settings.get("mode") or "affine")
    if mode != "affine":
        raise CheckpointError(
            f"quantization: the mode {printable(mode)[:40]} cannot be read; convert the model with affine"
        )
    return replaced(tensors, ("scales",), combine)


def _weight(parts: StoredParts, settings: Mapping[str, Any]) -> Tensor:
    rows, words = parts.matrix("weight")
    _, groups = parts.matrix("scales")
    group = settings.get("group_size")
    columns = group * groups if isinstance(group, int) and 0 < group <= 1 << 20 else 0
    bits = 32 * words // columns if columns else 0
    if bits not in _BITS or bits != settings.get("bits") or bits * columns != 32 * words:
        raise parts.fault(
            f"has {words} words and {groups} groups in a row, which are not what its bits and group_size "
            f"say: {describe(settings.get('bits'))} and {describe(group)}"
        )
    weight = parts.check("weight", ("U32",), (rows, words))
    scale = parts.check("scales", _FLOATS, (rows, groups))
    affine = _Affine(weight, scale, parts.check("biases", _FLOATS, (rows, groups)), bits)
    size = (rows, columns, bits, columns // groups)
    return GroupedMatrix(*size, affine.codes, affine.scales, minima=affine.biases).tensor(parts)
