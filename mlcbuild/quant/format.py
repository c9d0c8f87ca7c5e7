"""A stored format as a value: its tensors, and the functions that turn weights into those tensors and back.

A format is one file below formats/, loaded by its name. No import statement names it, so the key of a step
holds the source of the formats that the step lists in `Step.code`, and of no other.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias

from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.quant import formats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlcbuild.quant.blocks import BlockRows, Blocks
    from mlcbuild.quant.floats import Array, Scratch

    Pack: TypeAlias = Callable[[Array, Scratch, str], Sequence[Array]]
    Unpack: TypeAlias = Callable[[Sequence[Array], tuple[int, int]], NDArray[np.float32]]

Shape: TypeAlias = Callable[[int, int], tuple[int, ...]]
"""Function from (rows, columns) of a matrix to the shape of one of the tensors that store it."""

ITEM_BYTES = {"float32": 4, "float16": 2, "uint32": 4, "uint8": 1}
"""Dtype that stored tensors may have -> bytes of one element."""


@dataclass(frozen=True)
class FormatTensor:
    """One of the tensors in which a format stores a matrix."""

    suffix: str
    """Last part of the tensor's name, which is `<parameter without .weight>.<suffix>`."""
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Format:
    """A way to store matrices, in one physical layout."""

    tensors: tuple[FormatTensor, ...]
    """The tensors that store a matrix, in the order in which files hold them and libraries take them. Axis 0
    of each counts blocks of `rows_per_index` matrix rows, so that a matrix can be converted in parts.
    """
    pack: Pack
    """Function of (rows of a matrix, scratch memory, the parameter's name for errors) that returns the arrays
    of `tensors`.

    The rows [N, K] are float32, float16, or bfloat16 as its bits in uint16. The arrays may lie in the scratch
    memory, which the next call overwrites, or be the argument itself. Raises CheckpointError for weights that
    the format cannot hold.
    """
    unpack: Unpack
    """Function of (the arrays of `tensors`, (N, K)) that returns the float32 matrix [N, K] that they stand
    for."""
    bits_per_weight: float
    """Number of stored bits per weight, scales included, for a matrix whose size needs no padding."""
    bits: int = 0
    """Number of bits of one code; 0: weights are stored as floating point numbers."""
    group_size: int = 0
    """Number of consecutive weights of a row that share a scale; 0 without scales."""
    dtype: Literal["float32", "float16"] = "float16"
    """Type of the stored scales, of parameters that are no matrices, and of the KV cache."""
    rows_per_index: int = 1
    """Number of matrix rows that one index of axis 0 of every stored tensor covers."""
    blocks: Blocks | None = None
    """Description of the codes and scales that this format stores, if it keeps the values of quantized
    checkpoints exactly; None for other formats.
    """
    pack_blocks: Callable[[Sequence[BlockRows], str], Sequence[Array]] | None = None
    """Function of (consecutive quantized rows, the parameter's name for errors) that returns the arrays of
    `tensors`, in place of `pack`. Raises CheckpointError for infinite weights and NaN. None: the format takes
    no quantized rows."""


@cache
def format_names() -> tuple[str, ...]:
    """Returns the name of every format, sorted: the names of the files below formats/."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(formats.__path__)))


def format_module(name: str) -> str:
    """Returns the dotted name of a format's module."""
    return f"{formats.__name__}.{name}"


@cache
def layouts(name: str) -> Mapping[str, Format]:
    """Loads a format by its name and returns it in each physical layout: layout -> format. Raises UsageError
    for an unknown name."""
    if name not in format_names():
        raise UsageError(f"format '{name}' does not exist; {did_you_mean(name, format_names())}")
    by_layout: Mapping[str, Format] = import_module(format_module(name)).FORMATS
    return by_layout


def load_format(name: str, layout: str) -> Format:
    """Returns the format called `name` in the physical layout called `layout`. Raises UsageError if either
    does not exist.
    """
    by_layout = layouts(name)
    if layout not in by_layout:
        raise UsageError(
            f"format '{name}' cannot be stored in layout '{layout}', which the backend of the target reads; "
            f"it has: {', '.join(by_layout)}; choose a scheme that the device supports"
        )
    return by_layout[layout]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, as weights files store it and as a compiled library receives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str

    @property
    def size(self) -> int:
        """The size of the stored tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
