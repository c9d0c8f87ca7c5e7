"""Reads the header of a GGUF file: its metadata, and the positions of its tensors.

A file is "GGUF", version (u32), number of tensors (u64), number of metadata entries (u64), the entries, the
tensors' descriptions, padding, and the tensors' bytes, each at a multiple of `general.alignment`. All numbers
are little-endian. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Files come from strangers, so every length is compared with the remaining bytes before anything is read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from mlcbuild_format import regular
from mlcbuild_format.fields import describe, printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.checkpoint_kinds import GGUF_PART
from mlcbuild.checkpoints.gguf_types import TYPES, UNREADABLE
from mlcbuild.errors import CheckpointError

Numbers: TypeAlias = NDArray[np.generic]
Value: TypeAlias = str | int | float | bool | list[str] | Numbers
"""The type of a metadata value in a GGUF file; an array of numbers is a NumPy array, and one of booleans a
NumPy array of uint8."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_KEY = 1 << 16
"""Largest length of a metadata key or of a tensor's name in bytes; a longer one raises CheckpointError. For
keys it is the limit of the GGUF format itself."""
LONGEST_SHOWN = 100
"""Maximum number of characters of a tensor's or key's name that an error message shows."""
MOST_STRINGS = 1 << 22
"""Largest number of strings in one metadata array; more raise CheckpointError. Vocabularies have up to
300,000; a short string takes 60 bytes of memory."""
MOST_DIMENSIONS = 4
"""Largest number of dimensions of a tensor, which is ggml's limit."""
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Number of a metadata value's type in GGUF -> NumPy's name of the type."""
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Gguf:
    """The metadata and the tensors of one model, which may be in several GGUF files."""

    metadata: Mapping[str, Value]
    """Metadata key -> value, read from the first GGUF file of the model."""
    tensors: Mapping[str, Tensor]
    """Tensor name in GGUF -> the tensor's file, type, shape, and offset in bytes from the beginning of the
    file. Shapes are in NumPy's order, rows first.
    """


def read_gguf(path: Path) -> Gguf:
    """Reads the header of a GGUF file, or the headers of all files if it is one of a split model, and returns
    the first file's metadata and the tensors of all. Raises CheckpointError for a damaged, unreadable or
    missing file, an unsupported version or tensor type, a tensor in two files, and another number of tensors
    than a split model states.
    """
    paths = parts(path)
    metadata, tensors = _read_part(paths[0])
    for part in paths[1:]:
        _, more = _read_part(part)
        for name, tensor in more.items():
            if name in tensors:
                raise CheckpointError(
                    f"{part}: tensor '{shown(name)}' is also in {tensors[name].path.name}; fetch the files "
                    "again"
                )
            tensors[name] = tensor
    count = metadata.get("split.tensors.count")
    if isinstance(count, int) and count != len(tensors):
        raise CheckpointError(
            f"{path}: the parts must hold {count} tensors (split.tensors.count), found {len(tensors)}; fetch "
            "the files again"
        )
    return Gguf(metadata, tensors)


def parts(path: Path) -> tuple[Path, ...]:
    """Returns the paths of all files of a GGUF model, in order. path: any of them; "NAME-00001-of-00003.gguf"
    belongs to three in the same directory; any other name is the only one, and is returned without a check.

    Raises CheckpointError if one of several is missing, or the name states that there are none.
    """
    split = GGUF_PART.fullmatch(path.name)
    if split is None:
        return (path,)
    stem, _, count = split.groups()
    paths = tuple(path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1))
    for part in paths:
        if not part.is_file():
            raise CheckpointError(
                f"{part}: this part of {path.name} is missing; fetch all {int(count)} parts"
            )
    if not paths:
        raise CheckpointError(f"{path}: its name says that it has no parts; rename it to {stem}.gguf")
    return paths


def _read_part(path: Path) -> tuple[dict[str, Value], dict[str, Tensor]]:
    try:
        with regular.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _Reader(path, file, size).read()
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); check its permissions") from None


def shown(name: str) -> str:
    """Returns the beginning of a metadata key's or tensor's name, with special characters escaped, for an
    error message.
    """
    return printable(name, LONGEST_SHOWN)


class _Reader:
    """Reads the header of one GGUF file from front to back: `read` returns (metadata, tensors) as name ->
    value and name -> Tensor. Raises CheckpointError for a file that is damaged, is not GGUF, or has a version
    or a tensor type that cannot be read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._left = size

    def read(self) -> tuple[dict[str, Value], dict[str, Tensor]]:
        tensor_count, entry_count = self._counts()
        metadata: dict[str, Value] = {}
        for _ in range(entry_count):
            key = self._string("a metadata key", LONGEST_KEY)
            if key in metadata:
                raise self._wrong(f"metadata key '{shown(key)}' stands twice")
            metadata[key] = self._value(shown(key))
        described = [self._description() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or isinstance(alignment, bool)
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 1 << 20
        ):
            raise self._wrong(f"general.alignment must be a power of two, found {describe(alignment)}")
        start = -(-(self._size - self._left) // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for tensor in described:
            if tensor.name in tensors:
                raise self._wrong(f"tensor '{shown(tensor.name)}' stands twice")
            tensors[tensor.name] = self._placed(tensor, start, alignment)
        return metadata, tensors

    def _counts(self) -> tuple[int, int]:
        magic = self._bytes(4, "the magic number")
        if magic != MAGIC:
            raise CheckpointError(
                f"{self._path}: is not a GGUF file (it must begin with 'GGUF'); check the path"
            )
        version = int(self._number("<u4", "the version"))
        if version not in VERSIONS:
            if version == 1 or version >> 16:
                kind = "version 1" if version == 1 else "big-endian"
                raise CheckpointError(
                    f"{self._path}: is a {kind} GGUF file, and only little-endian versions 2 and 3 can be "
                    "read; convert the model again"
                )
            raise self._wrong(f"its version must be 2 or 3, found {version}")
        tensors, entries = (int(self._number("<u8", "a count")) for _ in range(2))
        # A tensor's description takes at least 32 bytes, and a metadata entry 13.
        if 32 * tensors + 13 * entries > self._left:
            raise self._wrong(
                f"{tensors} tensors and {entries} metadata entries do not fit its {self._size} bytes"
            )
        return tensors, entries

    def _description(self) -> Tensor:
        """Reads one entry of a GGUF file's tensor table and returns it. Its `start` is relative to the
        beginning of the file's data section. Raises CheckpointError for a type that cannot be read, and for
        sizes that do not fit the type or the file.
        """
        name = self._string("a tensor's name", LONGEST_KEY)
        subject = f"tensor '{shown(name)}'"
        count = int(self._number("<u4", subject))
        if not 1 <= count <= MOST_DIMENSIONS:
            raise self._wrong(f"{subject} must have 1 to {MOST_DIMENSIONS} dimensions, found {count}")
        sizes = [int(self._number("<u8", subject)) for _ in range(count)]
        number, offset = (
            int(self._number("<u4", subject)),
            int(self._number("<u8", subject)),
        )
        kind = TYPES.get(number)
        if kind is None:
            unreadable = UNREADABLE.get(number)
            type_words = f"the type {unreadable}" if unreadable else f"a type that does not exist ({number})"
            raise CheckpointError(
                f"{self._path}: {subject} has {type_words}, which cannot be read; use a file of another "
                "quantization, such as Q4_K_M or Q8_0"
            )
        # Dimensions are stored with the fastest first. Any product above the file's size is wrong.
        weights = math.prod(sizes)
        if not weights or sizes[0] % kind.weights or weights // kind.weights * kind.size > self._size:
            raise self._wrong(f"{subject} of type {kind.name} cannot have the dimensions {sizes}")
        size = weights // kind.weights * kind.size
        return Tensor(name, kind.name, tuple(reversed(sizes)), self._path, offset, size)

    def _placed(self, tensor: Tensor, data: int, alignment: int) -> Tensor:
        start = data + tensor.start
        if tensor.start % alignment or start + tensor.size > self._size:
            raise self._wrong(
                f"tensor '{shown(tensor.name)}' must lie in the file at a multiple of {alignment}, found "
                f"offset {tensor.start} and {tensor.size} bytes"
            )
        return Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.path, start, tensor.size)

    def _value(self, key: str) -> Value:
        """Reads and returns a metadata value. key: the name of the value in error messages. Raises
        CheckpointError for a type that GGUF does not define, an array of arrays, a text that is not UTF-8,
        too many strings, or a value beyond the end of the file.
        """
        kind = int(self._number("<u4", key))
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(key, self._left)
        if kind == _BOOL:
            return bool(self._bytes(1, key)[0])
        if kind not in _NUMBERS:
            raise self._wrong(f"metadata key '{key}' has a type that does not exist ({kind})")
        return self._number(_NUMBERS[kind], key)

    def _array(self, key: str) -> list[str] | Numbers:
        kind, count = int(self._number("<u4", key)), int(self._number("<u8", key))
        if kind == _STRING:
            if count > MOST_STRINGS or 8 * count > self._left:
                raise self._wrong(f"metadata key '{key}' cannot hold {count} strings")
            return [self._string(key, self._left) for _ in range(count)]
        name = "?" if kind == _BOOL else _NUMBERS.get(kind)
        if name is None:
            raise self._wrong(f"metadata key '{key}' is an array of a type that cannot be read ({kind})")
        dtype = np.dtype(name)
        if count * dtype.itemsize > self._left:
            raise self._wrong(f"metadata key '{key}' cannot hold {count} numbers")
        return np.frombuffer(self._bytes(count * dtype.itemsize, key), np.uint8 if kind == _BOOL else dtype)

    def _number(self, name: str, subject: str) -> int | float:
        dtype = np.dtype(name)
        number: int | float = np.frombuffer(self._bytes(dtype.itemsize, subject), dtype)[0].item()
        return number

    def _string(self, subject: str, most: int) -> str:
        (length,) = struct.unpack("<Q", self._bytes(8, subject))
        if length > min(most, self._left):
            raise self._wrong(f"{subject} cannot have {length} bytes")
        try:
            return self._bytes(length, subject).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"{subject} is not UTF-8 text") from None

    def _bytes(self, count: int, subject: str) -> bytes:
        data = self._file.read(count) if count <= self._left else b""
        if len(data) < count:
            raise self._wrong(f"it ends within {subject}")
        self._left -= count
        return data

    def _wrong(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: is damaged or incomplete: {sentence}; fetch it again")
