"""Reads GPTQ checkpoints: codes packed along the inputs (`qweight`), zero points along the outputs
(`qzeros`), `scales`, and the group of each input (`g_idx`).

A weight is (code - zero) * scale. Version 1 of the format stores zero points minus 1, version 2 stores them
unchanged, and some files state the wrong version. Weights average to zero, so the mean of codes minus stored
zero points shows the version: about 1 in version 1, 0 in version 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.bit_streams import Codes, unpacked
from mlcbuild.checkpoints.grouped_codes import GroupedMatrix
from mlcbuild.checkpoints.number_types import values_of
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import Floats, StoredParts, group_places, group_size, replaced
from mlcbuild.errors import CheckpointError

_FLOATS = ("F16", "BF16", "F32")
_WORDS = ("I32", "U32")
_BITS = (2, 3, 4, 5, 6, 8)
_FORMATS = {"gptq": 1, "": 1, "gptq_v2": 2}
"""Value of checkpoint_format in a quantization_config ("" if absent) -> version of the GPTQ format, 1 or 2.
Other values are refused."""
_MODULES, _OUTPUTS = 16, 32
"""_MODULES: least number of modules (evenly spaced, at most 31; all if there are fewer), and _OUTPUTS:
largest number of rows of each, whose codes are averaged and compared with the average stored zero point, to
detect the version of the GPTQ format."""


@dataclass(frozen=True)
class _Gptq:
    """The tensors of one matrix in GPTQ format: the checked codes, zero points and scales, and the group
    indices if there are any."""

    parts: StoredParts
    bits: int
    inputs: int
    outputs: int
    groups: int

    def codes(self, reader: RowReader, first: int, count: int) -> Codes:
        lines = self.inputs * self.bits // 32
        words = reader.elements(self.parts["qweight"], (0, lines), (first, first + count))
        return unpacked(words.T, self.bits)

    def scales(self, reader: RowReader, first: int, count: int) -> Floats:
        tensor = self.parts["scales"]
        raw = reader.elements(tensor, (0, self.groups), (first, first + count))
        return values_of(raw, tensor.dtype).T

    def zeros(self, add: int, reader: RowReader, first: int, count: int) -> NDArray[np.int16]:
        """Returns the zero points of `count` rows of a GPTQ matrix from row `first` on, [count, groups]. add:
        number that is added to stored zero points, 1 or 0 depending on the format's version; the sum wraps
        around at 2^bits.
        """
        begin = first // 32  # 32 codes fill whole words
        end = min(-(-(first + count) // 32) * self.bits, self.outputs * self.bits // 32)
        words = reader.elements(self.parts["qzeros"], (0, self.groups), (begin * self.bits, end))
        stored = unpacked(words, self.bits)[:, first - 32 * begin :][:, :count].T.astype(np.int16)
        wrapped: NDArray[np.int16] = stored + np.int16(add) & np.int16((1 << self.bits) - 1)
        return wrapped

    def offset(self) -> float:
        """Returns the mean, over the first 32 rows (outputs) of a GPTQ matrix, of codes minus stored zero
        points."""
        with Rows() as reader:
            count = min(_OUTPUTS, self.outputs)
            codes, zeros = self.codes(reader, 0, count), self.zeros(0, reader, 0, count)
            return float(codes.mean() - zeros.mean())


def view(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> tensor of a GPTQ checkpoint with one tensor, `<module>.weight`, whose rows are computed
    when they are read, in place of the parts of each quantized matrix. Scales of activations and KV caches
    are left out; other tensors stay. settings: its quantization_config. Raises CheckpointError for parts that
    are missing or do not fit together, and for unsupported settings."""
    named = str(settings.get("checkpoint_format") or "")
    if named not in _FORMATS:
        raise CheckpointError(
            f"quantization_config: checkpoint_format {printable(named)[:40]} cannot be read; it must be "
            "gptq or gptq_v2: save the model in one of them"
        )
    matrices: dict[str, _Gptq] = {}

    def collect(parts: StoredParts) -> dict[str, Tensor]:
        matrices[parts.module] = _matrix(parts)
        return dict(parts.tensors)

    replaced(tensors, ("qweight",), collect)
    add, note = _decision([*matrices.values()], _FORMATS[named])

    def combine(parts: StoredParts) -> dict[str, Tensor]:
        matrix = matrices[parts.module]
        group = group_size(parts, matrix.inputs, matrix.groups, settings.get("group_size"))
        places = group_places(parts, "g_idx", matrix.inputs, matrix.groups, group)
        zeros = partial(matrix.zeros, add)
        size = (matrix.outputs, matrix.inputs, matrix.bits, group)
        weight = GroupedMatrix(*size, matrix.codes, matrix.scales, zeros, places=places)
        used = ("qweight", "qzeros", "scales", "g_idx")
        others = {part: item for part, item in parts.tensors.items() if part not in used}
        return {"weight": weight.tensor(parts, note), **others}

    return replaced(tensors, ("qweight",), combine)


def _matrix(parts: StoredParts) -> _Gptq:
    words, outputs = parts.matrix("qweight")
    groups, packed = parts.matrix("qzeros")
    bits = 32 * packed // outputs
    inputs = 32 * words // bits if bits else 0
    if bits not in _BITS or 32 * packed % outputs or 32 * words % bits:
        raise parts.fault(
            f"has {outputs} outputs and qzeros of {packed} words; they must be packed in "
            f"{', '.join(map(str, _BITS))} bits"
        )
    parts.check("qweight", _WORDS, (words, outputs))
    parts.check("qzeros", _WORDS, (groups, packed))
    parts.check("scales", _FLOATS, (groups, outputs))
    return _Gptq(parts, bits, inputs, outputs, groups)


def _decision(matrices: list[_Gptq], named: int) -> tuple[int, str]:
    """Determines whether a GPTQ checkpoint stores zero points minus 1: by the mean of codes minus stored zero
    points or, where that is not within 0.4 of 0 or 1, by the version of the format that the checkpoint
    states, `named`. Returns (number to add to stored zero points, remark for the log on how it was
    determined).
    """
    some = matrices[:: max(1, len(matrices) // _MODULES)]
    offset = float(np.mean([matrix.offset() for matrix in some])) if some else 0.0
    by_value = 1 if 0.6 < offset < 1.4 else 2 if -0.4 < offset < 0.4 else named
    how = {1: "stored less 1 (version 1)", 2: "stored as they are (version 2)"}[by_value]
    against = "" if by_value == named else f", although checkpoint_format says version {named}"
    reason = f"codes exceed the stored ones by {offset:.2f} on average"
    return 2 - by_value, f"GPTQ with zero points {how}, since {reason}{against}"
