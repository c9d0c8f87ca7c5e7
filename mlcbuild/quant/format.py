"""Loads and describes stored formats of weights: the tensors in which a format stores a matrix, and the
functions that pack and unpack it.

A format is one file below mlcbuild/quant/formats/, loaded by its name. No import statement names it, so the
key of a step holds the source of the formats that the step lists in `Step.code`, and of no other.
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
"""Function from (rows, columns) of a matrix to the shape of a stored tensor, such as that of its codes or of
its scales."""

ITEM_BYTES = {"float32": 4, "float16": 2, "uint32": 4, "uint8": 1}
"""Dtype that stored tensors may have -> bytes of one element."""


@dataclass(frozen=True)
class FormatTensor:
    """One of the tensors in which a format stores a matrix, such as its codes or its scales: name, dtype and
    shape."""

    suffix: str
    """Last component of the stored tensor's name, which is `<parameter without .weight>.<suffix>`, such as
    "q_scale"."""
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Format:
    """A way to store weight matrices [N, K] as one or more tensors, in one physical layout."""

    tensors: tuple[FormatTensor, ...]
    """The tensors that store a matrix, in the order in which weights files hold them and compiled libraries
    take them. Index i of axis 0 of each covers the matrix rows from i * rows_per_index on, so that a matrix
    can be converted a few rows at a time."""
    pack: Pack
    """Function of (rows of a matrix, scratch memory, the parameter's name for error messages) that quantizes
    the rows and returns the arrays to store, one for each item of `tensors`, such as codes and scales.

    The rows [N, K] are float32, float16, or bfloat16 as its bits in uint16. The arrays may lie in the scratch
    memory, which the next call overwrites, or be the argument itself. Raises CheckpointError for weights that
    the format cannot hold.
    """
    unpack: Unpack
    """Function of (the stored arrays of a matrix, such as codes and scales, in the order of `tensors`; the
    matrix's size (N, K)) that returns the dequantized matrix, float32 [N, K]."""
    bits_per_weight: float
    """Number of stored bits per weight, scales included, for a matrix whose size needs no padding."""
    bits: int = 0
    """Number of bits of one quantized weight, scales not included; 0: weights are stored as floating point
    numbers."""
    group_size: int = 0
    """Number of consecutive weights of a row that share a scale; 0 for a format without scales."""
    dtype: Literal["float32", "float16"] = "float16"
    """Type of vectors such as norm weights, and of the KV cache, in a model in this format. It is also the
    type of the stored scales, or of weights without scales, except in a format with `blocks`, which state the
    type of scales."""
    rows_per_index: int = 1
    """Number of matrix rows that one index of axis 0 of every stored tensor covers: 1, or 16 if the matrix is
    stored in tiles of 16 rows."""
    blocks: Blocks | None = None
    """The bits and types of codes, scales and minima, for formats that keep the values of quantized
    checkpoints or whose scales are the product of a float16 shared by 256 weights and an integer; None for
    other formats."""
    pack_blocks: Callable[[Sequence[BlockRows], str], Sequence[Array]] | None = None
    """Function of (consecutive rows of an already quantized matrix, the parameter's name for error messages)
    that returns the arrays in which this format stores the rows, such as codes and scales, without changing a
    value. Raises CheckpointError for a scale or minimum that is NaN or of a magnitude of 2**120 or more.
    None: the format cannot store quantized rows."""
    pack_calibrated: Callable[[Array, NDArray[np.float32], str], Sequence[Array]] | None = None
    """Function of (rows of a matrix [N, K], float32, float16 or bfloat16 bits in uint16; the importance of
    each column, float32 [K]; the parameter's name for error messages) that quantizes the rows and returns the
    arrays in which this format stores them, such as codes and scales. The scales minimize squared errors
    times the importance of their columns. Raises CheckpointError for weights that the format cannot hold.
    None: the format cannot consider importance."""


@cache
def format_names() -> tuple[str, ...]:
    """Returns the names of all stored formats, sorted: those of the files below mlcbuild/quant/formats/."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(formats.__path__)))


def format_module(name: str) -> str:
    """Returns the dotted name of the Python module that defines the stored format of weights `name`, such as
    "q4s"; it is not checked that the format exists."""
    return f"{formats.__name__}.{name}"


@cache
def layouts(name: str) -> Mapping[str, Format]:
    """Loads a stored format by its name and returns name of a physical layout, such as "row" -> the format in
    this layout. Raises UsageError for an unknown format name."""
    if name not in format_names():
        raise UsageError(f"format '{name}' does not exist; {did_you_mean(name, format_names())}")
    by_layout: Mapping[str, Format] = import_module(format_module(name)).FORMATS
    return by_layout


def load_format(name: str, layout: str) -> Format:
    """Returns the stored format called `name` in the physical layout called `layout`. Raises UsageError if
    the format does not exist or does not have this layout.
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
    """The name, shape, dtype and physical layout of one tensor, as weights files store it and a compiled
    library receives it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str

    @property
    def size(self) -> int:
        """Returns the size of the stored tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
