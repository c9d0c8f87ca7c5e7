"""The built-in schemes with the layouts of CPUs and of GPUs, and functions that pack single matrices, for
tests."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from mlcbuild.errors import UsageError
from mlcbuild.quant import Storage
from mlcbuild.quant.floats import Array, Scratch
from mlcbuild.quant.schemes import SCHEMES as BUILT_IN
from mlcbuild.targets.backends import BACKENDS

SCHEMES: dict[str, Storage] = {name: BACKENDS["cpu"].storage(scheme) for name, scheme in BUILT_IN.items()}
GPU_SCHEMES: dict[str, Storage] = {}
for _name, _scheme in BUILT_IN.items():
    with suppress(UsageError):  # GPUs need not have kernels for every format.
        GPU_SCHEMES[_name] = BACKENDS["webgpu"].storage(_scheme)
SIMPLE = {name: scheme for name, scheme in SCHEMES.items() if scheme.definition.blocks is None}
"""The built-in schemes except those with scales in two levels."""
QUANTIZED = [scheme for scheme in SIMPLE.values() if scheme.bits and len(scheme.definition.tensors) == 2]
"""The built-in schemes that store codes and a single scale for each group, without minima."""


def normal(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Returns a matrix of normally distributed weights, float32 [rows, columns], the same for the same
    seed."""
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


def pack(weight: Array, scheme: Storage, name: str = "matrix") -> tuple[Array, ...]:
    """Quantizes a matrix and returns the tensors in which the scheme stores it. weight: the matrix, [rows,
    columns]; name: its name in error messages."""
    return tuple(scheme.definition.pack(weight, Scratch(), name))


def unpack(tensors: tuple[Array, ...], scheme: Storage, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns the dequantized matrix, float32 [rows, columns]. tensors: the tensors in which it is stored;
    scheme: the quantization that stored them; shape: (rows, columns)."""
    rows, columns = shape
    return scheme.definition.unpack(tensors, (rows, columns))
