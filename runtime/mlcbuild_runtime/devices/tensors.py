"""Maps the tensors of weights files into memory, in the order a library takes them, without copies."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from mlcbuild_format import safetensors, weights
from mlcbuild_format.errors import BundleError
from mlcbuild_format.signature import Tensor
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes. Kernels use aligned vector loads: a tensor elsewhere would end the process by a signal."""
BACKED = 64
"""Entries that get memory together."""

Array = NDArray[np.generic]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Weights:
    """Tensors, in the library's order. They are views of `maps`, which must live as long."""

    arrays: tuple[Array, ...]
    maps: tuple[mmap.mmap, ...]


def aligned(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """The array, or a copy of it, that starts at a multiple of ALIGNMENT."""
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def prefer_large_pages(address: int, size: int) -> None:
    """Ask the system to back memory, or a mapped file that it has yet to read, with large pages: looking up
    the addresses of small ones takes a quarter of the time of reading much memory once. Does nothing where
    the system has no such choice."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    if start < end:
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call(start, end - start, advice)


def back(tensor: Array, first: int, last: int) -> Iterator[int]:
    """Has the system give memory for tensor[:, first:last], by writing zeros: virtual machines take long to
    give it. Rests after each part with the index up to which all have it."""
    for start in range(first, last, BACKED):
        end = min(start + BACKED, last)
        for row in tensor:
            ctypes.memset(row[start:end].ctypes.data, 0, row[start:end].nbytes)
            yield start
        yield end


def load(path: Path, names: Sequence[str], params: Sequence[Tensor]) -> Weights:
    """The tensors `params`, from the files `names` in the directory `path`.

    The few that are not aligned are copied. Raises BundleError when one is missing or of another form.
    """
    maps: list[mmap.mmap] = []
    found: dict[str, tuple[safetensors.Tensor, NDArray[np.uint8]]] = {}
    for name in names:
        header = weights.read_header(path / name)
        with (path / name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        maps.append(mapped)
        data = _bytes(mapped)
        prefer_large_pages(data.ctypes.data, data.nbytes)
        found |= {tensor.name: (tensor, data) for tensor in header.tensors}
    arrays = [_view(name, tuple(shape), dtype, found) for name, shape, dtype, _ in params]
    return Weights(tuple(arrays), tuple(maps))


def _bytes(mapped: mmap.mmap) -> NDArray[np.uint8]:
    """The bytes of a map. DLPack knows no read-only arrays, so this one claims to be writable: it is not."""
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(mapped)).from_address(address))


def _view(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    found: Mapping[str, tuple[safetensors.Tensor, NDArray[np.uint8]]],
) -> Array:
    if name not in found:
        raise BundleError(f"the library takes the tensor '{name}', which no weights file holds")
    tensor, data = found[name]
    if (tensor.shape, tensor.dtype) != (shape, dtype):
        raise BundleError(
            f"{tensor.path}: the tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, but the"
            f" library takes {dtype} {list(shape)}: build the bundle again"
        )
    size = np.dtype(dtype).itemsize * math.prod(shape)
    view = aligned(data[tensor.start : tensor.start + size])
    return view.view(dtype).reshape(shape)
