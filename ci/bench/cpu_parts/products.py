"""Creates random operands of matrix products and compiles kernels for CPUs, for the benchmarks of kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm

from mlcbuild.compiler.cpu.isa import tvm_target
from mlcbuild.compiler.cpu.lowering import KERNELS
from mlcbuild.compiler.phases import kernel_pipeline
from mlcbuild.targets.target import Target

CPUS = {
    "avx512amx": "sapphirerapids",
    "avx512vnni": "cascadelake",
    "avx512": "x86-64-v4",
    "avxvnni": "alderlake",
    "avx2": "x86-64-v3",
    "portable": "x86-64-v2",
}
COLD = 160 << 20
"""Bytes of all weights that a benchmark uses in rotation: more than the last-level cache holds, so that they
are read from memory."""


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.uniform(0.01, 0.02, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype)


def compiled(target: Target, functions: dict[str, tvm.tirx.PrimFunc]) -> dict[str, Callable[..., None]]:
    module = tvm.IRModule(
        {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    library = tvm.compile(module, target=tvm_target(target), tir_pipeline=kernel_pipeline(KERNELS))
    return {name: library.mod[name] for name in functions}


def tensor(values: np.ndarray) -> object:
    """Returns a copy of a NumPy array as a tensor of TVM, whose memory is aligned as the kernels require."""
    return tvm.runtime.tensor(values)
