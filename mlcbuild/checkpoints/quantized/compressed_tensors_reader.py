"""Reads the formats of the package compressed-tensors. The tensors of each module show which format it has.

| format | tensors |
|---|---|
| pack-quantized | `weight_packed`: words of codes with 2^(bits - 1) added; `weight_scale`; `weight_shape` |
| int-quantized | `weight`: int8; `weight_scale` |
| float-quantized | `weight`: 8-bit floats; `weight_scale` for the tensor, each row or each block |
| nvfp4-pack-quantized | `weight_packed`: bytes; `weight_scale` for 16 columns / `weight_global_scale` |
| mxfp4-pack-quantized | `weight_packed`: bytes; `weight_scale` for 32 columns, a power of two |

Asymmetric integers have a `weight_zero_point`, packed along the outputs where codes are packed; those with
act-order have a `weight_g_idx`, the group of each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.bit_streams import Codes, unpacked, unpacked_fields
from mlcbuild.checkpoints.grouped_codes import GroupedMatrix
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.scaled_floats import FLOATS, scaled
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.small_float_codes import Fp4Matrix
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, group_places, group_size, replaced, whole
from mlcbuild.errors import CheckpointError
from mlcbuild.quant.groups import GROUP

_SCALES = ("F16", "BF16", "F32")
_REFUSED = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
_USED = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "weight_global_scale",
)


@dataclass(frozen=True)
class _Integers:
    """The checked tensors of one matrix of integer codes in a compressed-tensors checkpoint."""

    parts: StoredParts
    rows: int
    columns: int
    bits: int
    groups: int
    is_dense: bool
    """True if the bits of a code may be divided between two words; False: words hold whole codes only."""

    def codes(self, reader: RowReader, first: int, count: int) -> Codes:
        packed = self.parts.get("weight_packed")
        if packed is None:
            raw = reader.elements(self.parts["weight"], (first, first + count))
            return raw.view(np.uint8) ^ np.uint8(128)
        words = reader.elements(packed, (first, first + count))
        codes = unpacked(words, self.bits) if self.is_dense else unpacked_fields(words, self.bits)
        return codes[:, : self.columns]

    def scales(self, reader: RowReader, first: int, count: int) -> Floats:
        scale = self.parts["weight_scale"]
        if scale.shape in ((), (1,), (1, 1)):
            return np.broadcast_to(whole(reader, scale).reshape(1, 1), (count, 1))
        return reader.values(scale, first, count).reshape(count, self.groups)

    def zeros(self, reader: RowReader, first: int, count: int) -> NDArray[np.int16]:
        middle = np.int16(1 << (self.bits - 1))
        zero = self.parts.get("weight_zero_point")
        if zero is None:
            return np.full((count, self.groups), middle)
        if self.parts.get("weight_packed") is None:
            tensor = self.parts["weight_scale"]
            span = (0, 1) if tensor.shape in ((), (1,), (1, 1)) else (first, first + count)
            raw = reader.elements(zero, span).astype(np.int16) + middle
            return np.broadcast_to(raw.reshape(-1, self.groups), (count, self.groups))
        size, words = (32, self.bits) if self.is_dense else (32 // self.bits, 1)
        begin = first // size
        end = min(-(-(first + count) // size) * words, zero.shape[0])
        lines = reader.elements(zero, (begin * words, end)).T
        codes = unpacked(lines, self.bits) if self.is_dense else unpacked_fields(lines, self.bits)
        return codes[:, first - size * begin :][:, :count].T.astype(np.int16)


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of a compressed-tensors checkpoint with one tensor, `<module>.weight`, whose
    rows are computed when they are read, in place of the parts of each quantized matrix. Scales of
    activations and KV caches are left out; other tensors stay. settings: its quantization_config. Raises
    CheckpointError for parts that are missing or do not fit together, and for unsupported settings."""
    form = str(settings.get("format"))
    if form in _REFUSED or settings.get("transform_config"):
        unsupported = f"the format {printable(form)[:40]}" if form in _REFUSED else "a transform_config"
        raise CheckpointError(
            f"quantization_config: weights with {unsupported} cannot be read; save the model without it"
        )

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        others = {part: item for part, item in parts.tensors.items() if part not in _USED}
        return {"weight": _weight(parts), **others}

    return replaced(tensors, ("weight_packed", "weight_scale"), combine)


def _weight(parts: StoredParts) -> Tensor:
    packed = parts.get("weight_packed")
    if packed is not None and packed.dtype == "U8":
        return fp4_weight(parts, "weight_packed", "weight_global_scale", divides=True)
    if packed is None and parts["weight"].dtype in FLOATS:
        return scaled(parts, "weight_scale")
    matrix = _integers(parts)
    group = group_size(parts, matrix.columns, matrix.groups, None)
    places = group_places(parts, "weight_g_idx", matrix.columns, matrix.groups, group)
    size = (matrix.rows, matrix.columns, matrix.bits, group)
    return GroupedMatrix(*size, matrix.codes, matrix.scales, matrix.zeros, places=places).tensor(parts)


def _integers(parts: StoredParts) -> _Integers:
    """Checks and returns the tensors of a matrix of integer codes. Raises CheckpointError if a part is
    missing, or has another type or shape.
    """
    if parts.get("weight_packed") is None:
        rows, columns = parts.matrix("weight")
        parts.check("weight", ("I8",), (rows, columns))
        bits, is_dense = 8, True
    else:
        rows, words = parts.matrix("weight_packed")
        columns = _columns(parts, rows)
        parts.check("weight_packed", ("I32",), (rows, words))
        widths = {-(-columns * bits // 32): (bits, True) for bits in range(1, 9)}
        fields = {-(-columns // (32 // bits)): (bits, False) for bits in (3, 5, 6, 7)}
        if words not in widths and words not in fields:
            raise parts.fault(f"has {words} words for the {columns} columns of a row, which no bits fill")
        bits, is_dense = widths.get(words) or fields[words]
    scale = parts["weight_scale"]
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 1
    if scale.shape not in ((), (1,), (1, 1)):
        shape = (rows,) if scale.shape == (rows,) else (rows, groups)
        parts.check("weight_scale", _SCALES, shape)
    elif scale.dtype not in _SCALES:
        parts.check("weight_scale", _SCALES, (1,))
    if not 0 < groups <= columns:
        raise parts.fault(f"has scales of {groups} groups for {columns} columns")
    matrix = _Integers(parts, rows, columns, bits, groups, is_dense)
    _check_zeros(matrix, scale)
    return matrix


def _columns(parts: StoredParts, rows: int) -> int:
    """Returns the number of columns that the tensor weight_shape of a module states. rows: the number of rows
    it must state. Raises CheckpointError if it states another number of rows, or no number of columns from 1
    to 2^30."""
    tensor = parts.check("weight_shape", ("I64", "I32"), (2,))
    with Rows() as reader:
        stated_rows, columns = (int(size) for size in reader.elements(tensor, (0, 2)))
    if stated_rows != rows or not 0 < columns <= 1 << 30:
        raise parts.fault(f"has the weight_shape {[stated_rows, columns]} and weights of {rows} rows")
    return columns


def _check_zeros(matrix: _Integers, scale: Tensor) -> None:
    if matrix.parts.get("weight_zero_point") is None:
        return
    if matrix.parts.get("weight_packed") is None:
        matrix.parts.check("weight_zero_point", ("I8",), scale.shape)
        return
    per_word = 32 // matrix.bits
    words = -(-matrix.rows * matrix.bits // 32) if matrix.is_dense else -(-matrix.rows // per_word)
    matrix.parts.check("weight_zero_point", ("I32",), (words, matrix.groups))


def fp4_weight(parts: StoredParts, packed: str, overall: str, *, divides: bool) -> Tensor:
    """Returns the weight of a module of 4-bit floats in the format NVFP4 or MXFP4; its float32 rows are
    computed when they are read. packed: name of the tensor with the codes; overall: name of the tensor with a
    scale for the whole matrix, which only NVFP4 has: if the module lacks it, the format is MXFP4; divides:
    True if scales are divided by it, False if they are multiplied. Raises CheckpointError if a tensor is
    missing, or has another type or shape."""
    rows, half = parts.matrix(packed)
    parts.check(packed, ("U8",), (rows, half))
    is_wide = parts.get(overall) is None
    group = 32 if is_wide else 16
    if 2 * half % group:
        raise parts.fault(f"has {2 * half} columns, which are no groups of {group}")
    kinds = ("U8", "F8_E8M0") if is_wide else ("F8_E4M3",)
    scale = parts.check("weight_scale", kinds, (rows, 2 * half // group))
    total = parts.get(overall)
    if total is not None:
        parts.check(overall, ("F32",), total.shape if total.shape in ((), (1,)) else (1,))
    matrix = Fp4Matrix(parts[packed], scale, 2 * half, group, total, divides)
    kind = "MXFP4" if is_wide else "NVFP4" if 2 * half % GROUP == 0 else "F32"
    return parts.computed((rows, 2 * half), matrix.load, kind, None if kind == "F32" else matrix.unpack)
