"""Reads AWQ checkpoints in the layout GEMM: codes and zero points are packed along the outputs, eight in a
word of 32 bits, which has those of outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on.

A weight is (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.bit_streams import Codes, unpacked
from mlcbuild.checkpoints.grouped_codes import GroupedMatrix
from mlcbuild.checkpoints.number_types import values_of
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, group_size, replaced
from mlcbuild.errors import CheckpointError

_FLOATS = ("F16", "BF16", "F32")
_WORDS = ("I32", "U32")
_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position of a column among the eight columns of an AWQ int32 word -> index of its 4-bit code in the word,
counted from the lowest bits.
"""


@dataclass(frozen=True)
class _Awq:
    """The three checked tensors of one matrix in AWQ format: codes, zero points, scales."""

    parts: StoredParts
    inputs: int
    outputs: int
    groups: int

    def codes(self, reader: RowReader, first: int, count: int) -> Codes:
        return np.ascontiguousarray(self._packed(reader, "qweight", self.inputs, first, count).T)

    def zeros(self, reader: RowReader, first: int, count: int) -> NDArray[np.int16]:
        return self._packed(reader, "qzeros", self.groups, first, count).T.astype(np.int16)

    def scales(self, reader: RowReader, first: int, count: int) -> Floats:
        tensor = self.parts["scales"]
        raw = reader.elements(tensor, (0, self.groups), (first, first + count))
        return values_of(raw, tensor.dtype).T

    def _packed(self, reader: RowReader, part: str, lines: int, first: int, count: int) -> Codes:
        begin, end = first // 8, -(-(first + count) // 8)
        words = reader.elements(self.parts[part], (0, lines), (begin, end))
        codes = unpacked(words, 4).reshape(lines, -1, 8)[:, :, _ORDER].reshape(lines, -1)
        return codes[:, first - 8 * begin :][:, :count]


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of an AWQ checkpoint with one tensor, `<module>.weight`, whose rows are computed
    when they are read, in place of the parts of each quantized matrix. Scales of activations and KV caches
    are left out; other tensors stay. settings: its quantization_config. Raises CheckpointError for parts that
    are missing or do not fit together, and for unsupported settings."""
    layout = str(settings.get("version") or "gemm").lower()
    if layout != "gemm":
        raise CheckpointError(
            f"quantization_config: version {printable(layout)[:40]} cannot be read; it must be gemm: save "
            "the model with version GEMM"
        )

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        inputs, words = parts.matrix("qweight")
        groups, outputs = parts.matrix("scales")
        parts.check("qweight", _WORDS, (inputs, outputs // 8))
        parts.check("qzeros", _WORDS, (groups, outputs // 8))
        parts.check("scales", _FLOATS, (groups, 8 * words))
        matrix = _Awq(parts, inputs, outputs, groups)
        group = group_size(parts, inputs, groups, settings.get("group_size", settings.get("q_group_size")))
        weight = GroupedMatrix(outputs, inputs, 4, group, matrix.codes, matrix.scales, matrix.zeros)
        used = ("qweight", "qzeros", "scales")
        others = {part: item for part, item in parts.tensors.items() if part not in used}
        return {"weight": weight.tensor(parts), **others}

    return replaced(tensors, ("qweight",), combine)
