"""Reads the headers of weights files (safetensors) and checks that what they promise is there.

A file is: 8 bytes little-endian length of the header, the header (JSON, padded with spaces), the data.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mlcbuild_runtime.errors import BundleError
from mlcbuild_runtime.fields import FieldError, Fields, Json

FORMAT = "mlcbuild-weights/1"
MAX_HEADER = 100 << 20
"""Bytes; larger headers are not read."""

DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "U32": ("uint32", 4),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I32": ("int32", 4),
}


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
    """The checked header of one file: every tensor lies inside it. Raises BundleError with one sentence."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise BundleError(f"{path}: truncated, or not a weights file; copy the bundle again")
            document = json.loads(file.read(length))
        return _header(path, document, data=8 + length, size=size)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    except FieldError as error:
        raise BundleError(f"{path}: in its header, {error}; build the bundle again") from None
    except (ValueError, RecursionError):
        raise BundleError(f"{path}: its header is not valid JSON; copy the bundle again") from None


def _header(path: Path, document: Json, data: int, size: int) -> Header:
    top = Fields(document)
    metadata = top.fields("__metadata__")
    if metadata.value.get("format") != FORMAT:
        raise FieldError(f"'__metadata__.format' must be '{FORMAT}', found {metadata.value.get('format')!r}")
    tensors = []
    for name in top.value:
        if name == "__metadata__":
            continue
        entry = top.fields(name)
        code = entry.text("dtype")
        if code not in DTYPES:
            raise FieldError(f"'{name}.dtype' must be one of {', '.join(DTYPES)}, found {code!r}")
        dtype, width = DTYPES[code]
        shape, offsets = entry.integers("shape"), entry.integers("data_offsets")
        if len(offsets) != 2 or offsets[1] - offsets[0] != width * math.prod(shape):
            raise FieldError(f"'{name}.data_offsets' do not hold {list(shape)} of {dtype}")
        if data + offsets[1] > size:
            raise FieldError(f"'{name}' ends after the end of the file")
        tensors.append(Tensor(name, dtype, shape, path, data + offsets[0]))
    return Header(metadata.text("signature"), str(metadata.value.get("scheme", "")), tuple(tensors))
