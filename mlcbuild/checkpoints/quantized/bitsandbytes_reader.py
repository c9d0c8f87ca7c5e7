"""Reads bitsandbytes checkpoints: 4-bit indices into a table of 16 numbers (nf4, fp4), or int8 with a scale
for each row (a weight is code * scale / 127).

In 4 bits, a weight is the product of its number in the table (`quant_map`) and the scale of its block
(`absmax`); blocks continue across the ends of rows. Scales may themselves be stored as bytes. A byte is an
index into a table of 256 numbers (`nested_quant_map`); the scale is that number times the scale of its block
(`nested_absmax`), plus an offset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mlcbuild_format import strict_json
from mlcbuild_format.safetensors import Tensor

from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, replaced, whole

_PART = "weight#"
"""Beginning of the names that the code gives to the tensors which describe a quantized weight, such as its
scales: `<module>.weight.absmax` of bitsandbytes is renamed `<module>.weight#absmax`, so that the last dot
follows the module."""
_PER_127 = np.float32(1 / 127)
_LARGEST_STATE = 4096
"""Maximum bytes of bitsandbytes' JSON description of a 4-bit matrix; a longer one is an error."""


@dataclass(frozen=True)
class _Nested:
    """The tensors and numbers by which one-byte scales of a bitsandbytes checkpoint are converted to float32:
    scale i is table[byte i] * scales[i // block] + offset.
    """

    table: Tensor
    scales: Tensor
    block: int
    offset: np.float32


@dataclass(frozen=True)
class _Table:
    """The checked tensors of one matrix of 4-bit codes in a bitsandbytes checkpoint."""

    packed: Tensor
    table: Tensor
    scales: Tensor
    columns: int
    block: int
    """Number of consecutive weights, also across the ends of rows, that share a scale."""
    nested: _Nested | None

    def load(self, reader: RowReader, first: int, count: int) -> Floats:
        """Returns `count` rows of the matrix from row `first` on, as float32 weights [count, columns].
        reader: reads the checkpoint's files.
        """
        begin, end = first * self.columns, (first + count) * self.columns
        raw = reader.elements(self.packed, (begin // 2, -(-end // 2))).reshape(-1)
        codes = np.stack([raw >> 4, raw & 15], -1).reshape(-1)[begin % 2 :][: end - begin]
        values: Floats = whole(reader, self.table).take(codes)
        low, high = begin // self.block, -(-end // self.block)
        scales = np.repeat(self._scales(reader, low, high), self.block)[begin - low * self.block :]
        with np.errstate(all="ignore"):  # Infinite weights are refused where weights are stored.
            values *= scales[: end - begin]
        return values.reshape(count, self.columns)

    def _scales(self, reader: RowReader, low: int, high: int) -> Floats:
        if self.nested is None:
            return reader.values(self.scales, low, high - low)
        nested = self.nested
        scales: Floats = whole(reader, nested.table).take(reader.elements(self.scales, (low, high)))
        first = low // nested.block
        blocks = reader.values(nested.scales, first, -(-high // nested.block) - first)
        with np.errstate(all="ignore"):
            scales *= blocks[np.arange(low, high) // nested.block - first]
            scales += nested.offset
        return scales


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of a bitsandbytes checkpoint with one tensor, `<module>.weight`, whose float32
    rows are computed when they are read, in place of the stored tensors (codes, scales and so on) of each
    quantized matrix. Scales of activations and KV caches are left out; other tensors stay. settings: unused.
    Raises CheckpointError for tensors that are missing, invalid or do not fit together, and for the layout of
    a GPU."""
    renamed = {}
    for name, tensor in tensors.items():
        module, dot, part = name.partition(".weight.")
        plain_name = f"{module}.{_PART}{part.partition('.')[0]}" if dot else name
        renamed[plain_name] = replace(tensor, name=plain_name)
    return replaced(renamed, (f"{_PART}quant_state", "SCB"), _combined)


def _combined(parts: StoredParts) -> dict[str, Tensor]:
    used = ("weight", "SCB", "weight_format")
    others = {p: item for p, item in parts.tensors.items() if p not in used and not p.startswith(_PART)}
    weight = _bytes(parts) if parts.get("SCB") is not None else _codes(parts)
    return {"weight": weight, **others}


def _bytes(parts: StoredParts) -> Tensor:
    """Returns the weight matrix of a module that bitsandbytes stored as int8 with a scale for each row; its
    float32 rows are computed when they are read. Raises CheckpointError if the scales are missing or have
    another shape, or if the matrix is stored in the layout of a GPU.
    """
    rows, columns = parts.matrix("weight")
    weight = parts.check("weight", ("I8",), (rows, columns))
    scale = parts.check("SCB", ("F32",), (rows,))
    layout = parts.get("weight_format")
    with Rows() as reader:
        if layout is not None and whole(reader, parts.check("weight_format", ("U8",), layout.shape)).any():
            raise parts.fault("is stored in the layout of a GPU; save the model with format row")

    def load(reader: RowReader, first: int, count: int) -> Floats:
        values = reader.values(weight, first, count)
        with np.errstate(all="ignore"):
            values *= reader.values(scale, first, count)[:, None]
            values *= _PER_127
        return values

    return parts.computed((rows, columns), load)


def _codes(parts: StoredParts) -> Tensor:
    """Returns the weight matrix of a module that bitsandbytes stored as 4-bit codes; its float32 rows are
    computed when they are read. Raises CheckpointError if one of the stored tensors (codes, table of values,
    scales) is missing or has another shape, or if their description (quant_state) is invalid.
    """
    state = _state(parts)
    rows, columns = _sizes(parts, state, "shape")
    (block,) = _sizes(parts, {"blocksize": [state.get("blocksize")]}, "blocksize")
    count = rows * columns
    weight = parts["weight"]
    packed = parts.check(
        "weight", ("U8",), (-(-count // 2), 1) if len(weight.shape) == 2 else (-(-count // 2),)
    )
    table = parts.check(f"{_PART}quant_map", ("F32",), (16,))
    scales, nested = -(-count // block), None
    if parts.get(f"{_PART}nested_absmax") is None:
        absmax = parts.check(f"{_PART}absmax", ("F32",), (scales,))
    else:
        absmax = parts.check(f"{_PART}absmax", ("U8",), (scales,))
        (size,) = _sizes(parts, {"nested_blocksize": [state.get("nested_blocksize")]}, "nested_blocksize")
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or not math.isfinite(offset):
            raise parts.fault("has a quant_state without a nested_offset")
        nested = _Nested(
            parts.check(f"{_PART}nested_quant_map", ("F32",), (256,)),
            parts.check(f"{_PART}nested_absmax", ("F32",), (-(-scales // size),)),
            size,
            np.float32(offset),
        )
    matrix = _Table(packed, table, absmax, columns, block, nested)
    return parts.computed((rows, columns), matrix.load)


def _state(parts: StoredParts) -> Mapping[str, Any]:
    """Returns the JSON object with which bitsandbytes describes a 4-bit matrix; it is stored as the bytes of
    a tensor. Raises CheckpointError if it is not such an object, or longer than 4,096 bytes.
    """
    tensor = parts[f"{_PART}quant_state"]
    size = math.prod(tensor.shape)
    if tensor.dtype != "U8" or size > _LARGEST_STATE:
        raise parts.fault(f"has a quant_state of {tensor.dtype} {list(tensor.shape)}, which is no JSON text")
    with Rows() as reader:
        data = reader.elements(tensor, (0, size)).tobytes() if len(tensor.shape) == 1 else b""
    try:
        state = strict_json.parse(data)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise parts.fault("has a quant_state that is no JSON object")
    return state


def _sizes(parts: StoredParts, state: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = state.get(name)
    count = 2 if name == "shape" else 1
    if not isinstance(values, list) or len(values) != count or not all(_is_size(item) for item in values):
        raise parts.fault(f"has a quant_state with the {name} {str(values)[:40]}")
    return tuple(values)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= 1 << 30
