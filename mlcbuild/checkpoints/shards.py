"""Safetensors files: where tensors lie in those that we read, and the layout of those that we write.

A file is 8 bytes (the header's length, little-endian), the header (JSON: tensor name -> dtype, shape,
data_offsets; `__metadata__` -> strings), then the tensors' bytes without gaps.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from safetensors import SafetensorError, safe_open

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import StoredTensor

CODES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}
"""The format's name of each dtype that weights files hold."""

ALIGNMENT = 64
"""Bytes: the widest vector of the CPUs that libraries are compiled for, and their cache line."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor's bytes are."""

    name: str
    dtype: str
    """The format's name, for example BF16."""
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]


def read_header(path: Path) -> Header:
    """The header of one file, which the safetensors package checks against the rules of the format.

    Tensors come in the order of their bytes. Raises CheckpointError with one sentence.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = file.seek(0, os.SEEK_END)
        if prefix == b"version ":
            raise CheckpointError(
                f"{path}: is a Git LFS pointer, not the weights; run 'git lfs pull' in the checkpoint"
            )
        with safe_open(path, "numpy") as opened:  # maps the file and reads its header, no tensor
            metadata: dict[str, str] = opened.metadata() or {}
            names: list[str] = opened.offset_keys()
            slices = [opened.get_slice(name) for name in names]
            forms: list[tuple[str, list[int]]] = [(part.get_dtype(), part.get_shape()) for part in slices]
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); check its permissions") from None
    except SafetensorError as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise CheckpointError(
            f"{path}: is truncated, damaged or not a safetensors file ({size} bytes; {reason}); "
            "fetch the file again"
        ) from None
    tensors = []
    start = 8 + int.from_bytes(prefix, "little")
    for name, (dtype, shape) in zip(names, forms, strict=True):
        tensors.append(Tensor(name, dtype, tuple(shape), path, start, math.prod(shape) * _bits(dtype) // 8))
        start += tensors[-1].size
    if start != size:
        raise CheckpointError(f"{path}: it changed while its header was read; run again")
    return Header(metadata, tuple(tensors))


def _bits(dtype: str) -> int:
    """Of one element. The format's names say it, as in BF16 and F8_E4M3, but for BOOL."""
    return 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])


@dataclass(frozen=True)
class Shard:
    """One file that we write."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    """Offset of each tensor in the file, in bytes."""
    size: int


def lay_out(tensors: Sequence[StoredTensor], metadata: Mapping[str, str], limit: int) -> tuple[Shard, ...]:
    """The files that hold the tensors, in order, each at most `limit` bytes of data where tensors allow it.

    A tensor lies in one file. Data begins at a multiple of ALIGNMENT, and tensors whose size is a multiple
    of it come first, so that they begin at one too.
    """
    files: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.size > limit:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.size
    return tuple(
        _shard(f"weights-{i:05}-of-{len(files):05}.safetensors", part, metadata)
        for i, part in enumerate(files, 1)
    )


def _shard(name: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> Shard:
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.size % ALIGNMENT != 0):
        starts[tensor.name], end = end, end + tensor.size
        document[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = 8 + len(text)
    starts = {tensor: data + start for tensor, start in starts.items()}
    return Shard(name, len(text).to_bytes(8, "little") + text, starts, data + end)
