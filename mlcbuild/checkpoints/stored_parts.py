"""Replaces the tensors in which a quantized checkpoint stores one matrix (codes, scales and so on) by one
tensor that is computed when it is read, and checks their names, shapes and types; wrong ones raise
CheckpointError."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from mlcbuild_format.fields import printable
from mlcbuild_format.safetensors import Tensor
from numpy.typing import NDArray

from mlcbuild.checkpoints.number_types import values_of
from mlcbuild.checkpoints.row_reader import Rows
from mlcbuild.checkpoints.shards import ONLY_FLOAT32, ComputedTensor, RowReader
from mlcbuild.errors import CheckpointError
from mlcbuild.quant.blocks import BlockRows

Floats = NDArray[np.float32]
IGNORED = frozenset(
    {
        *("input_scale", "input_global_scale", "activation_scale", "input_zero_point", "output_scale"),
        *("k_scale", "v_scale", "q_scale", "k_proj_scale", "v_proj_scale"),
    }
)
"""Last parts of the names of tensors that scale activations or KV caches. They are ignored, since they do not
change weights.
"""


@dataclass(frozen=True)
class StoredParts:
    """The stored tensors of one module of a model, such as model.layers.0.mlp.down_proj."""

    module: str
    tensors: Mapping[str, Tensor]
    """The stored tensors of one module of a model, keyed by the last part of their names: "qweight" -> the
    tensor model.layers.0.mlp.down_proj.qweight.
    """

    def __getitem__(self, part: str) -> Tensor:
        if part not in self.tensors:
            raise self.fault(f"lacks its {part}")
        return self.tensors[part]

    def get(self, part: str) -> Tensor | None:
        return self.tensors.get(part)

    def fault(self, message: str) -> CheckpointError:
        """Returns, but does not raise, a CheckpointError for wrong stored tensors of a module. message:
        continues a sentence about the module, and may end with a remedy after a semicolon; the default remedy
        is to fetch the checkpoint again."""
        path = next(iter(self.tensors.values())).path
        remedy = "" if ";" in message else "; fetch the checkpoint again"
        return CheckpointError(
            f"{path}: module '{printable(self.module)[:200]}' {printable(message)}{remedy}"
        )

    def check(self, part: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> Tensor:
        """Returns one of the stored tensors of a module of a model, such as model.layers.0.mlp.down_proj.
        part: last part of the tensor's name, such as "qweight". Raises CheckpointError if the tensor is
        missing, its type is not one of `dtypes` (safetensors names), or it has another shape than `shape`.
        """
        tensor, dtypes = self[part], tuple(dtypes)
        if tensor.dtype not in dtypes or tensor.shape != shape:
            raise self.fault(
                f"must have a {part} of {' or '.join(dtypes)} {list(shape)}, found {tensor.dtype} "
                f"{list(tensor.shape)}; is the file what quantization_config says?"
            )
        return tensor

    def matrix(self, part: str) -> tuple[int, int]:
        """Returns the shape (rows, columns), as stored and perhaps packed, of a matrix among the stored
        tensors of one module of a model, such as model.layers.0.mlp.down_proj. part: last part of the
        tensor's name, such as "qweight". Raises CheckpointError if the tensor is missing, empty, or not a
        matrix."""
        tensor = self[part]
        if len(tensor.shape) != 2 or not all(tensor.shape):
            raise self.fault(f"must have a matrix as its {part}, found the shape {list(tensor.shape)}")
        return tensor.shape[0], tensor.shape[1]

    def computed(
        self,
        shape: tuple[int, ...],
        load: Callable[[RowReader, int, int], Floats],
        kind: str = "F32",
        unpack: Callable[[RowReader, int, int], BlockRows] | None = None,
        note: str = "",
        name: str = "weight",
    ) -> ComputedTensor:
        """Returns the tensor `name` of the module, whose float32 rows are computed from the stored tensors
        when they are read.

        shape: the tensor's shape. load: function from (reader of the checkpoint's files, first row, number of
        rows) to float32 rows. kind: the tensor type, such as "Q4_0", that holds the values exactly (see
        `FORMATS` of quant/as_is.py); "F32" if no type does. unpack: function like `load`, but to a BlockRows,
        the codes and scales of type `kind`; None: there are none. note: a remark for the log; for "F32" it is
        supplemented by the fact that no smaller format holds the values."""
        if kind == "F32":
            note = f"{note}; {ONLY_FLOAT32}" if note else ONLY_FLOAT32
        first = next(iter(self.tensors.values()))
        full = f"{self.module}.{name}" if self.module else name
        return ComputedTensor(full, kind, shape, first.path, first.start, first.size, load, unpack, note=note)


def replaced(
    tensors: Mapping[str, Tensor],
    marks: Iterable[str],
    combine: Callable[[StoredParts], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Returns name -> tensor for a checkpoint, with the stored tensors of each quantized module (such as
    model.layers.0.mlp.down_proj) replaced by those that the function `combine` computes.

    marks: last parts of tensor names; a module that has one of them is quantized. combine: function from a
    StoredParts, the stored tensors of one module, to last part of a name -> tensor, for all tensors that the
    module has afterwards. Tensors that scale activations or KV caches are removed everywhere. Raises
    CheckpointError with the problems of all modules (at most 20, then a count).
    """
    marks = frozenset(marks)
    result: dict[str, Tensor] = {}
    problems = []
    for module, parts in _modules(tensors).items():
        module_parts = StoredParts(
            module, {part: item for part, item in parts.items() if part not in IGNORED}
        )
        if marks & module_parts.tensors.keys():
            try:
                result |= {f"{module}.{part}": tensor for part, tensor in combine(module_parts).items()}
            except CheckpointError as error:
                problems.append(str(error))
        else:
            result |= {tensor.name: tensor for tensor in module_parts.tensors.values()}
    if problems:
        more = [f"... and {len(problems) - 20} more problems of these kinds"] if len(problems) > 20 else []
        raise CheckpointError("\n".join([*problems[:20], *more]))
    return result


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor if tensor.name == name else replace(tensor, name=name)
    return modules


def whole(reader: RowReader, tensor: Tensor) -> Floats:
    """Returns all values of a small stored tensor, such as a matrix's scales, as float32 in the tensor's
    shape. Raises CheckpointError if the file cannot be read or is too short.
    """
    rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else math.prod(tensor.shape)
    return values_of(reader.elements(tensor, (0, rows)), tensor.dtype).reshape(tensor.shape)


def group_size(parts: StoredParts, columns: int, groups: int, size: object) -> int:
    """Returns the number of columns of a matrix in a group that shares a scale: `size`, which
    quantization_config states, if this divides the columns into `groups` groups, the last perhaps shorter;
    else columns / groups. columns: those of the matrix; groups: number of groups in a row. Raises
    CheckpointError if that is no whole number.
    """
    if isinstance(size, int) and size > 0 and -(-columns // size) == groups:
        return size
    if columns % groups:
        raise parts.fault(f"has {columns} columns, which {groups} groups of one size do not fill")
    return columns // groups


def group_places(
    parts: StoredParts, part: str, columns: int, groups: int, size: int
) -> NDArray[np.intp] | None:
    """Returns the index of the group (of columns that share a scale) of each column of a matrix, which the
    module's stored tensor `part` lists; None if groups are made of consecutive columns.

    Writers leave the tensor out, or fill it with 0 or -1, where columns are in order. groups: number of
    groups; size: columns of a group. Raises CheckpointError for an index that names no group, and if the
    tensor is not I32 or I64 [columns].
    """
    if parts.get(part) is None:
        return None
    tensor = parts.check(part, ("I32", "I64"), (columns,))
    with Rows() as reader:
        places = reader.elements(tensor, (0, columns))
    if (places == -1).all():
        return None  # compressed-tensors marks unused lists with -1.
    if places.min() < 0 or places.max() >= groups:
        raise parts.fault(f"has the group {places.max()} in {part}, but scales of {groups} groups")
    in_order = np.array_equal(places, np.arange(columns) // size) or not places.any()
    return None if in_order else places.astype(np.intp)
