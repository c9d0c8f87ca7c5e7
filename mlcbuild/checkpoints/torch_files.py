"""Lists the tensors in PyTorch files (pytorch_model.bin), which are zip files with a pickle and the tensors'
numbers.

torch_pickle.py reads the pickle without executing anything; rows are read from their position in the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

from mlcbuild_format import regular
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import BITS, Tensor

from mlcbuild.checkpoints import torch_pickle
from mlcbuild.checkpoints.shard_index import index_faults, read_index
from mlcbuild.checkpoints.torch_pickle import PickledTensor, PickleError
from mlcbuild.checkpoints.zip_places import Member, ZipError, members, place
from mlcbuild.errors import CheckpointError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_PICKLE = "data.pkl"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that PyTorch versions before 1.6 wrote."""


def read_tensors(root: Path) -> dict[str, Tensor]:
    """Returns tensor name -> tensor for the PyTorch files in a directory: pytorch_model.bin or, without it,
    those that its index names. Raises CheckpointError with the problems of all files (at most 60).
    """
    index = None if (root / SINGLE).is_file() else read_index(root / INDEX, ".bin")
    tensors: dict[str, Tensor] = {}
    problems = []
    for name in [SINGLE] if index is None else sorted(set(index.values())):
        try:
            for tensor in read_file(root / name):
                if tensor.name in tensors:
                    problems.append(
                        f"{tensor.path}: tensor '{printable(tensor.name)}' is also in "
                        f"{tensors[tensor.name].path.name}; fetch the checkpoint again"
                    )
                tensors.setdefault(tensor.name, tensor)
        except CheckpointError as error:
            problems.append(str(error))
    problems = problems or index_faults(root / INDEX, index, tensors, lambda name: None)
    if problems:
        raise CheckpointError("\n".join(map(printable, problems[:60])))
    return tensors


def read_file(path: Path) -> list[Tensor]:
    """Returns a list of the tensors in one file that torch.save wrote. Raises CheckpointError for a file that
    is missing, unreadable, damaged, written by PyTorch before 1.6 or with big-endian numbers, or has objects
    other than tensors."""
    try:
        with regular.open_file(path) as file:
            return _tensors(path, file)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: it is not there; fetch the whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ZipError, PickleError) as fault:
        raise CheckpointError(
            f"{path}: {fault}; fetch the file again, or convert it to safetensors"
        ) from None


def _tensors(path: Path, file: BinaryIO) -> list[Tensor]:
    if file.read(len(_OLD)) == _OLD:
        raise PickleError("it was written by PyTorch before 1.6, in a format that is not read")
    file_members = members(file)
    pickles = [name for name in file_members if name.rpartition("/")[2] == _PICKLE and name.count("/") == 1]
    if len(pickles) != 1:
        raise ZipError(f"it must have one member {_PICKLE}, as torch.save writes it, found {len(pickles)}")
    root = pickles[0].removesuffix(_PICKLE)
    if (
        f"{root}byteorder" in file_members
        and _content(file, file_members, f"{root}byteorder", 16) != b"little"
    ):
        raise ZipError("its numbers are big-endian")
    stored = torch_pickle.read(_content(file, file_members, pickles[0], torch_pickle.LARGEST))
    places: dict[str, tuple[int, int]] = {}
    tensors = []
    for name, tensor in stored.items():
        member = f"{root}data/{tensor.storage.member}"
        if member not in places:
            places[member] = place(file, file_members, member)
        tensors.append(_placed(name, tensor, path, *places[member]))
    return tensors


def _content(file: BinaryIO, file_members: dict[str, Member], name: str, most: int) -> bytes:
    start, size = place(file, file_members, name)
    if size > most:
        raise ZipError(f"its member '{name}' has {size} bytes, more than {most}")
    file.seek(start)
    return file.read(size)


def _placed(name: str, tensor: PickledTensor, path: Path, start: int, size: int) -> Tensor:
    """Returns a tensor with its position in a PyTorch file. path: the file; start, size: offset and size in
    bytes of the storage that holds the tensor's numbers. Raises PickleError if the tensor extends beyond the
    storage, or its rows are not stored one after the other.
    """
    shown = printable(name)[:200]
    item = BITS[tensor.dtype] // 8
    content_size = item * math.prod(tensor.shape)
    stride = 1
    for length, step in zip(tensor.shape[::-1], tensor.strides[::-1], strict=True):
        if length > 1 and step != stride:
            raise PickleError(f"its tensor '{shown}' is a view whose rows are not stored one after the other")
        stride *= length
    if item * tensor.offset + content_size > size:
        raise PickleError(f"its tensor '{shown}' ends after the end of its storage")
    return Tensor(name, tensor.dtype, tensor.shape, path, start + item * tensor.offset, content_size)
