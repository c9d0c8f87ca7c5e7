"""Reads and writes the headers of safetensors files.

A file is 8 bytes (the header's length, little-endian), the header (JSON: tensor name -> dtype, shape,
data_offsets; `__metadata__` -> strings), then the tensors' bytes without gaps. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlcbuild_format import regular
from mlcbuild_format.fields import FieldError, Fields, Json, describe, parse_json, printable

MAX_HEADER = 32 << 20
"""Maximum size, in bytes, of a safetensors file's header that is read: 32 MiB, less than the 100 MB that the
safetensors format allows."""
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
ALIGNMENT = 64
"""Alignment of tensor data in bytes: the size of the widest vector register, and of a cache line, of the
supported CPUs."""

BITS: Mapping[str, int] = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""The safetensors name of a dtype -> bits of one element."""

NUMPY: Mapping[str, str] = {
    "F32": "float32",
    "F16": "float16",
    "U32": "uint32",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
}
"""The safetensors name of a dtype -> its name in NumPy, for the dtypes that weights files of bundles hold."""


class HeaderError(ValueError):
    """A file that breaks a rule of the safetensors format. The message names the rule, not the file."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that is stored in a safetensors file: its type, its shape, and the file and position of its
    bytes."""

    name: str
    dtype: str
    """The safetensors name of the element type, for example BF16, as the file's header has it; in a
    WeightsHeader, which describes a bundle's weights file, NumPy's name, for example float16."""
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset of the tensor's first byte in the file."""
    size: int
    """Size of the tensor in bytes."""


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    """The tensors of a safetensors file in the order of their bytes, which fill the file without gaps."""


def read_header(path: Path) -> Header:
    """Returns the header of a safetensors file, checked against the file's size. Raises OSError if the file
    cannot be read or is no regular file, HeaderError if it breaks a rule of the format or its header has more
    than 32 MiB."""
    with regular.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise HeaderError(f"it is truncated or damaged: {size} bytes do not hold the header")
        if length > MAX_HEADER:
            raise HeaderError(f"its header has {length} bytes, more than {MAX_HEADER}")
        text = file.read(length)
    try:
        document = parse_json(text)
    except ValueError as error:
        raise HeaderError(f"its header is not valid JSON ({error})") from None
    try:
        return _header(path, document, data=8 + length, size=size)
    except FieldError as error:
        raise HeaderError(f"in its header, {error}") from None


def _header(path: Path, document: Json, data: int, size: int) -> Header:
    top = Fields(document)
    # Writers of some checkpoints put null where they have no metadata.
    metadata = top.object(METADATA) if top.value.get(METADATA) is not None else {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise FieldError(f"'{METADATA}' must hold strings, found {describe(value)} at {describe(key)}")
    tensors = [_tensor(top, name, path, data) for name in top.value if name != METADATA]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.size))
    _check_places(tensors, data, size)
    return Header({key: str(value) for key, value in metadata.items()}, tuple(tensors))


def _tensor(top: Fields, name: str, path: Path, data: int) -> Tensor:
    entry, shown = top.fields(name).only("dtype", "shape", "data_offsets"), printable(name)
    dtype = entry.text("dtype")
    if dtype not in BITS:
        raise FieldError(f"'{shown}.dtype' must be one of {', '.join(BITS)}, found {describe(dtype)}")
    shape, offsets = entry.integers("shape"), entry.integers("data_offsets")
    if len(shape) > MAX_DIMENSIONS:
        raise FieldError(f"'{shown}.shape' has more than {MAX_DIMENSIONS} dimensions")
    bits = BITS[dtype] * math.prod(shape)
    if bits % 8 or len(offsets) != 2 or offsets[1] - offsets[0] != bits // 8:
        raise FieldError(f"'{shown}.data_offsets' do not hold {describe(list(shape))} of {dtype}")
    return Tensor(name, dtype, shape, path, data + offsets[0], bits // 8)


def _check_places(tensors: Iterable[Tensor], data: int, size: int) -> None:
    """Raises FieldError unless the tensors' bytes follow each other without gaps from the header to the
    file's end. `data` is the offset behind the header and `size` the file's size, both in bytes."""
    end = data
    for tensor in tensors:
        name = f"'{printable(tensor.name)}'"
        if tensor.start < end:
            raise FieldError(f"{name} begins before the end of the tensor in front of it")
        if tensor.start > end:
            raise FieldError(f"there are {tensor.start - end} bytes of no tensor in front of {name}")
        end = tensor.start + tensor.size
        if end > size:
            raise FieldError(f"{name} ends after the end of the file")
    if end < size:
        raise FieldError(f"there are {size - end} bytes behind the last tensor")


class NewTensor(Protocol):
    """The name, shape, dtype and size of a tensor that is to be written to a safetensors file, without its
    data."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """Returns the tensor's element type, as NumPy names it."""
        ...

    @property
    def size(self) -> int:
        """Returns the size of the tensor in bytes."""
        ...


@dataclass(frozen=True)
class NewFile:
    """The header of a safetensors file to be written, and the offsets of its tensors."""

    header: bytes
    """The first bytes of a safetensors file: 8 bytes with the length of the header, then the header."""
    starts: Mapping[str, int]
    """Tensor name -> offset of its first byte in the file."""
    size: int
    """Size of the whole safetensors file in bytes."""


def lay_out(tensors: Iterable[NewTensor], metadata: Mapping[str, str]) -> NewFile:
    """Lays out a new safetensors file, and returns its header, the offset of each tensor in the file, and the
    file's size. metadata: texts for the header's `__metadata__`. Tensor data begin at a multiple of 64 bytes;
    tensors whose size is a multiple of 64 bytes come first, so that each of them is aligned, too. Raises
    KeyError for a dtype that weights files of bundles do not hold."""
    codes = {name: code for code, name in NUMPY.items()}
    document: dict[str, object] = {METADATA: dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.size % ALIGNMENT != 0):
        starts[tensor.name], end = end, end + tensor.size
        document[tensor.name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    data = 8 + len(text)
    places = {name: data + start for name, start in starts.items()}
    return NewFile(len(text).to_bytes(8, "little") + text, places, data + end)
