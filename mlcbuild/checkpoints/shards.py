"""Safetensors files of checkpoints, and the division of weights into the files that we write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
from mlcbuild_format import safetensors
from mlcbuild_format.safetensors import Header, HeaderError, NewFile, Tensor
from numpy.typing import NDArray

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import StoredTensor

_POINTER = b"version "
"""The first bytes of a Git LFS pointer."""


@dataclass(frozen=True)
class PackedTensor(Tensor):
    """A tensor whose bytes are not its rows, in order, in a dtype of NumPy."""

    decode: Callable[[NDArray[np.uint8], NDArray[np.float32]], None]
    """Writes the float32 values of rows' bytes [rows, bytes of a row] to [rows, columns]."""
    interleaved_heads: int = 0
    """Heads whose rows i and i + dim/2 are stored side by side; 0: rows are in order."""


def read_header(path: Path) -> Header:
    """Returns the header of one file. Raises CheckpointError."""
    try:
        try:
            return safetensors.read_header(path)
        except HeaderError as error:
            raise _damaged(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        return CheckpointError(
            f"{path}: is a Git LFS pointer, not the weights; run 'git lfs pull' in the checkpoint"
        )
    return CheckpointError(
        f"{path}: is truncated, damaged or not a safetensors file ({path.stat().st_size} bytes; "
        f"{shorten(reason, 200, placeholder=' ...')}); fetch the file again"
    )


@dataclass(frozen=True)
class Shard:
    """One file that we write."""

    name: str
    file: NewFile


def lay_out(tensors: Sequence[StoredTensor], metadata: Mapping[str, str], limit: int) -> tuple[Shard, ...]:
    """Returns the files that hold the tensors, in order, each of at most `limit` bytes of data.

    A tensor lies in one file, so that a large one may exceed the limit.
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
