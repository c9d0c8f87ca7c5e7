"""Reads the headers of weights files (safetensors) and checks that what they promise is there.

A file is: 8 bytes little-endian length of the header, the header (JSON, padded with spaces), the data.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcbuild_format import files
from mlcbuild_format.errors import BundleError
from mlcbuild_format.fields import FieldError, Fields, Json, describe, parse_json
from mlcbuild_format.versions import WEIGHTS as FORMAT

MAX_HEADER = 32 << 20
"""Bytes; larger headers are not read."""

DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "U32": ("uint32", 4),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I32": ("int32", 4),
}
WIDTHS = dict(DTYPES.values())
MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset in the file, in bytes."""


@dataclass(frozen=True)
class Header:
    signature: str
    scheme: str
    tensors: tuple[Tensor, ...]


def read_header(path: Path) -> Header:
    """The checked header of one file, whose tensors fill the file. Raises BundleError with one sentence."""
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise BundleError(f"{path}: truncated, or not a weights file; copy the bundle again")
            document = parse_json(file.read(length))
        return _header(path, document, data=8 + length, size=size)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    except FieldError as error:
        raise BundleError(f"{path}: in its header, {error}; build the bundle again") from None
    except ValueError as error:
        raise BundleError(f"{path}: its header is not valid JSON ({error}); copy the bundle again") from None


def _header(path: Path, document: Json, data: int, size: int) -> Header:
    top = Fields(document)
    metadata = top.fields("__metadata__")
    version = metadata.value.get("format")
    if version != FORMAT:
        raise FieldError(f"'__metadata__.format' must be '{FORMAT}', found {describe(version)}")
    scheme = metadata.text("scheme") if "scheme" in metadata.value else ""
    tensors = [_tensor(top, name, path, data) for name in top.value if name != "__metadata__"]
    _check_places(tensors, size)
    return Header(metadata.text("signature", "[0-9a-f]{64}"), scheme, tuple(tensors))


def _tensor(top: Fields, name: str, path: Path, data: int) -> Tensor:
    entry = top.fields(name).only("dtype", "shape", "data_offsets")
    code = entry.text("dtype")
    if code not in DTYPES:
        raise FieldError(f"'{name}.dtype' must be one of {', '.join(DTYPES)}, found {describe(code)}")
    dtype, width = DTYPES[code]
    shape, offsets = entry.integers("shape"), entry.integers("data_offsets")
    if len(shape) > MAX_DIMENSIONS:
        raise FieldError(f"'{name}.shape' has more than {MAX_DIMENSIONS} dimensions")
    if len(offsets) != 2 or offsets[1] - offsets[0] != width * math.prod(shape):
        raise FieldError(f"'{name}.data_offsets' do not hold {describe(list(shape))} of {dtype}")
    return Tensor(name, dtype, shape, path, data + offsets[0])


def _check_places(tensors: Sequence[Tensor], size: int) -> None:
    """Tensors lie one behind the other, up to the file's end: a file is not larger than what is in it."""
    end = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if end is not None and tensor.start < end:
            raise FieldError(f"'{tensor.name}' begins before the end of the tensor in front of it")
        end = tensor.start + WIDTHS[tensor.dtype] * math.prod(tensor.shape)
        if end > size:
            raise FieldError(f"'{tensor.name}' ends after the end of the file")
    if end is not None and end < size:
        raise FieldError(f"there are {size - end} bytes behind the last tensor")
