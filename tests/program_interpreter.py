"""An interpreter of GPU programs in NumPy, which executes launches, buffers and inputs without a GPU.

Kernels are NumPy functions, so that errors of the host program and errors of GPU kernels are found by
different tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlcbuild_format.program import WORD, Program, Sizes, check, evaluate, scalar_values
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Grid = tuple[int, int]
KernelFunction = Callable[[Mapping[str, Bytes], Mapping[str, int], Grid], None]
"""A function that does with NumPy what a GPU kernel does, changing buffers in place. Its arguments are
binding name -> bytes of the bound part of a buffer, scalar name -> value, and the number of workgroups in x
and y."""


@dataclass
class Interpreter:
    """Executes a GPU program with NumPy in place of a GPU: holds its buffers as byte arrays and its kernels
    as Python functions. Creating it raises FieldError if a launch exceeds its buffers."""

    program: Program
    pages: int
    kernels: Mapping[str, KernelFunction]
    params: Mapping[str, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.program, self.pages)
        sizes = {**self.program.param_bytes(), **self.program.buffer_bytes(self.pages)}
        self.buffers = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        for name, values in self.params.items():
            self.buffers[name][: values.size] = values
        for name, rope in self.program.ropes.items():
            angles = np.arange(rope.rows, dtype=np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
            table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(rope.factor)
            self.buffers[name][:] = table.astype(np.float32).ravel().view(np.uint8)

    def write(self, inputs: Mapping[str, Sequence[int]]) -> None:
        (block,) = (name for name, spec in self.program.buffers.items() if spec.kind == "inputs")
        words = self.buffers[block].view(np.int32)
        for name, values in inputs.items():
            start = self.program.inputs[name].start
            words[start : start + len(values)] = values

    def run(self, function: str, sizes: Sizes) -> int:
        """Executes the kernel launches of one function of the GPU program in order, and returns their number.
        sizes: name of a call's dimension, such as its number of tokens, -> value."""
        variant, launched = self.program.variant(function, sizes), 0
        for launch in variant.launches:
            kernel = self.program.kernels[launch.kernel]
            scalars = scalar_values(kernel, launch, {**sizes, "pages": self.pages})
            x, y = (evaluate(extent, scalars) for extent in kernel.grid)
            bound = {}
            for binding, use in zip(kernel.bindings, launch.uses, strict=True):
                size = evaluate(binding.size, scalars)
                part = self.buffers[use.name][use.offset : use.offset + size]
                assert part.size == size, f"{launch.kernel} leaves {use.name}"
                bound[binding.name] = part.view()
                bound[binding.name].flags.writeable = binding.written
            if x and y:
                self.kernels[launch.kernel](bound, scalars, (x, y))
                launched += 1
        return launched

    def floats(self, name: str, count: int) -> NDArray[np.float32]:
        return self.buffers[name][: count * WORD].view(np.float32)
