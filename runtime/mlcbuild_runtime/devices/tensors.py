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
from mlcbuild_format.errors import BundleError, SetupError
from mlcbuild_format.signature import Tensor
from numpy.typing import NDArray

ALIGNMENT = 64
"""Required alignment of tensors in bytes: kernels use aligned vector loads, which fault elsewhere."""
BACKED = 64
"""Number of KV cache pages for which memory is allocated at a time while the engine is idle. Allocation
during requests delayed them by 0.1 s on a virtual machine (`ci/bench/serve`)."""

Array = NDArray[np.generic]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Weights:
    """The weights of a bundle as arrays, in the order in which its library takes them. The arrays are views
    of the memory maps `maps`, which must stay open as long as the arrays are used."""

    arrays: tuple[Array, ...]
    maps: tuple[mmap.mmap, ...]


def aligned(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Returns `array` itself if its data start at a multiple of 64 bytes, else a copy whose data do."""
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    buffer = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def prefer_large_pages(address: int, size: int) -> None:
    """Advises the system to use huge pages for the `size` bytes of memory at `address`, which may be a mapped
    file that it has yet to read.

    With small pages, TLB misses take a quarter of the time of reading large memory once. Does nothing where
    the system has no madvise for it, and ignores a refusal.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    if start < end:
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call(start, end - start, advice)


def back(tensor: Array, first: int, last: int) -> Iterator[int]:
    """Allocates memory for the entries `first` to `last` - 1 of the second dimension of an array by
    overwriting them with zeros, since page faults are slow in virtual machines; their content is lost. Yields
    after each part: the index in the second dimension up to which all entries now have memory."""
    for start in range(first, last, BACKED):
        end = min(start + BACKED, last)
        for row in tensor:
            ctypes.memset(row[start:end].ctypes.data, 0, row[start:end].nbytes)
            yield start
        yield end


def load(path: Path, names: Sequence[str], params: Sequence[Tensor]) -> Weights:
    """Returns the tensors that `params` lists, (name, shape, dtype, layout) each, in this order as NumPy
    arrays that are mapped from the weights files `names` in the directory `path`, together with the memory
    maps. Tensors that are not aligned, which are few, are copied. Layouts are not compared. Raises
    BundleError if a file is damaged, or a tensor is missing or has another dtype or shape, SetupError if the
    system cannot map a file."""
    maps: list[mmap.mmap] = []
    stored: dict[str, tuple[safetensors.Tensor, NDArray[np.uint8]]] = {}
    for name in names:
        header = weights.read_header(path / name)
        mapped = _mapped(path / name)
        maps.append(mapped)
        data = _bytes(mapped)
        prefer_large_pages(data.ctypes.data, data.nbytes)
        stored |= {tensor.name: (tensor, data) for tensor in header.tensors}
    arrays = [_view(name, tuple(shape), dtype, stored) for name, shape, dtype, _ in params]
    return Weights(tuple(arrays), tuple(maps))


def _mapped(file: Path) -> mmap.mmap:
    """Returns a read-only memory map of a whole file, which must not be empty. Raises SetupError if the
    system cannot open or map it, for example for a limit of address space, or because its file system maps no
    files."""
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SetupError(
            f"{file}: cannot be mapped into memory: {error.strerror}; raise this process's limits, or copy"
            " the bundle to a local disk"
        ) from None


def _bytes(mapped: mmap.mmap) -> NDArray[np.uint8]:
    """Returns the bytes of a memory map as an array that is valid while the map is open. The array must not
    be written, which would crash the process: it claims to be writable only because DLPack has no read-only
    arrays."""
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(mapped)).from_address(address))


def _view(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    stored: Mapping[str, tuple[safetensors.Tensor, NDArray[np.uint8]]],
) -> Array:
    if name not in stored:
        raise BundleError(f"the library takes the tensor '{name}', which no weights file holds")
    tensor, data = stored[name]
    if (tensor.shape, tensor.dtype) != (shape, dtype):
        raise BundleError(
            f"{tensor.path}: the tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, but the"
            f" library takes {dtype} {list(shape)}: build the bundle again"
        )
    size = np.dtype(dtype).itemsize * math.prod(shape)
    view = aligned(data[tensor.start : tensor.start + size])
    return view.view(dtype).reshape(shape)
