"""Describes tensors of checkpoints that must be decoded or computed, and divides a bundle's weights among
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from mlcbuild_format import safetensors
from mlcbuild_format.safetensors import NewFile, Tensor
from numpy.typing import NDArray

from mlcbuild.quant import StoredTensor
from mlcbuild.quant.blocks import BlockRows

ONLY_FLOAT32 = "no format below float32 holds its values exactly"
"""The remark on a quantized tensor whose values `as-is` keeps by storing them in float32."""


@dataclass(frozen=True)
class PackedTensor(Tensor):
    """A tensor of a checkpoint that must be decoded: its bytes are not rows of a NumPy dtype in order."""

    decode: Callable[[NDArray[np.uint8], NDArray[np.float32]], None]
    """Function (stored bytes, out) that decodes rows of the tensor: it writes their float32 values to `out`,
    an array [rows, columns]. The stored bytes are an array uint8 [rows, bytes of a row]."""
    interleaved_heads: int = 0
    """Number of attention heads whose rows are stored in the order of GGUF files: within each head of `dim`
    rows, rows i and i + dim/2 are stored side by side. Reading restores the order; 0: the rows are in
    order."""
    unpack: Callable[[NDArray[np.uint8]], BlockRows] | None = None
    """Function from rows of the tensor, passed as bytes, uint8 [rows, bytes of a row], to their integer codes
    and scales (a BlockRows), not dequantized; None: the tensor is not quantized.
    """


@dataclass(frozen=True)
class ComputedTensor(Tensor):
    """A tensor whose rows are computed from stored tensors when they are read."""

    load: Callable[[RowReader, int, int], NDArray[np.float32]]
    """Function from (reader of the checkpoint's files, first row, number of rows) to float32 rows of the
    tensor, [number, columns], or [number] for a vector; columns take the place of rows if `by_columns` is
    set. The rows of a stack of matrices follow each other."""
    unpack: Callable[[RowReader, int, int], BlockRows] | None = None
    """Function from (reader of the checkpoint's files, first row, number of rows) to these rows of the tensor
    (columns, if `by_columns` is set), not dequantized: a BlockRows with integer codes [rows, columns] and a
    scale for each group of columns. None: the tensor has no quantized form."""
    by_columns: bool = False
    """True if the functions `load` and `unpack` of this tensor receive a first column and a number of columns
    in place of rows, and return each column as a row.
    """
    note: str = ""
    """A remark for the log on how the stored bytes of a quantized tensor were read, such as whether zero
    points are stored minus 1, or that no format below float32 holds its values exactly; "" if there is none.
    """


class RowReader(Protocol):
    """The interface of objects that read rows of stored tensors from files and keep the files open."""

    def values(self, tensor: Tensor, first: int, count: int) -> NDArray[np.float32]:
        """Returns `count` rows of a stored tensor from row `first` on, as float32 [count, columns], or
        [count] for a vector. Raises CheckpointError if the file cannot be read or is too short.
        """
        ...

    def elements(
        self, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Returns elements [rows, columns] of a stored tensor, or [rows] of a vector, in its stored dtype:
        bfloat16 as uint16, 8-bit floats as uint8. rows, columns: ranges (start, stop); None: all columns. The
        tensor must have a plain dtype of safetensors, not one that must be decoded. Raises CheckpointError if
        the file cannot be read or is too short.

        The rows of a tensor with more than two dimensions are those of all of its matrices, one after the
        other."""
        ...


@dataclass(frozen=True)
class Shard:
    """The planned name and contents (header and places of tensors, without their values) of one weights file
    of a bundle."""

    name: str
    file: NewFile


def lay_out(tensors: Sequence[StoredTensor], metadata: Mapping[str, str], limit: int) -> tuple[Shard, ...]:
    """Distributes tensors, in order, to weights files of a bundle with at most `limit` bytes of data each,
    and returns the planned files.

    metadata: key -> text in the header of each file. A tensor is never divided, so that a file with one large
    tensor may exceed the limit. Files are named weights-00001-of-00003.safetensors and so on; without tensors
    there is one empty file.
    """
    parts: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.size
    return tuple(
        Shard(f"weights-{i:05}-of-{len(parts):05}.safetensors", safetensors.lay_out(part, metadata))
        for i, part in enumerate(parts, 1)
    )
