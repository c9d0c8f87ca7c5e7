"""Safetensors files: headers that are checked before a byte is used, and the files that we write.

A file is 8 bytes (the header's length, little-endian), the header (JSON: tensor name -> dtype, shape,
data_offsets; `__metadata__` -> strings), then the tensors' bytes without gaps.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import StoredTensor

BITS = {
    code: bits
    for bits, codes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "I64 U64 F64 C64"),
    )
    for code in codes.split()
}
"""Bits of an element, for every dtype that the format defines."""

CODES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}
"""The format's name of each dtype that weights files hold."""

MAX_HEADER = 100_000_000
"""Bytes; the safetensors library reads no longer ones."""

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


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json.loads(object_pairs_hook=...): a name given twice is an error, where json keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' stands in it twice")
    return found


def read_header(path: Path) -> Header:
    """The header of one file, after every rule of the format was checked.

    Raises CheckpointError with a line for each fault.
    """
    document, start, size = _document(path)
    metadata = document.pop("__metadata__", None) or {}
    faults: list[str] = []
    texts: dict[str, str] = {}
    for name, text in metadata.items() if isinstance(metadata, dict) else [("__metadata__", None)]:
        if isinstance(text, str):
            texts[name] = text
        else:
            faults.append(f"its metadata must map names to strings, but '{name}' is no string")
    tensors = []
    for name, entry in document.items():
        found = _tensor(path, name, entry, start)
        if isinstance(found, Tensor):
            tensors.append(found)
        else:
            faults.append(f"tensor '{name}' {found}")
    faults = faults or _coverage(tensors, start, size)
    if faults:
        raise CheckpointError("\n".join(f"{path}: {fault}; fetch the file again" for fault in faults))
    return Header(texts, tuple(tensors))


def _document(path: Path) -> tuple[dict[str, object], int, int]:
    """(header, offset of the data, size of the file)."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path}: is a Git LFS pointer, not the weights; run 'git lfs pull' in the checkpoint"
                )
            if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: is truncated or not a safetensors file (size {size}); fetch the file again"
                )
            document = json.loads(file.read(length).decode(), object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is not valid JSON ({str(error) or 'too deep'}); fetch the file again"
        ) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object; fetch the file again")
    return document, 8 + length, size


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(path: Path, name: str, entry: object, start: int) -> Tensor | str:
    """The tensor of one entry of a header, or what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "must have the fields dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"has the dtype {dtype!r}, which safetensors does not define"
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        return f"has the shape {shape!r}, which is no list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        return f"has the data_offsets {offsets!r}, which are no pair of offsets"
    size, bits = offsets[1] - offsets[0], BITS[dtype] * math.prod(shape)
    if size * 8 != bits:
        return f"has {size} bytes of data, but {dtype} of shape {shape} has {-(-bits // 8)}"
    return Tensor(name, dtype, tuple(shape), path, start + offsets[0], size)


def _coverage(tensors: Sequence[Tensor], start: int, size: int) -> list[str]:
    """Faults when the tensors do not fill the data exactly."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != start:
            return [
                f"the bytes of tensor '{tensor.name}' overlap those of another, or leave a gap before them"
            ]
        start += tensor.size
    if size < start:
        return [f"is truncated: it has {size} bytes, its header promises {start}"]
    if size > start:
        return [f"has {size - start} bytes more than its header promises"]
    return []


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
        size = stored_size(tensor)
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += size
    return tuple(
        _shard(f"weights-{i:05}-of-{len(files):05}.safetensors", part, metadata)
        for i, part in enumerate(files, 1)
    )


def stored_size(tensor: StoredTensor) -> int:
    """Bytes."""
    return math.prod(tensor.shape) * BITS[CODES[tensor.dtype]] // 8


def _shard(name: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> Shard:
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: stored_size(tensor) % ALIGNMENT != 0):
        starts[tensor.name], end = end, end + stored_size(tensor)
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
