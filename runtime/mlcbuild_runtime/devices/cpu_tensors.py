"""Tensors that go into the calls of a CPU's library, made once and written again for each call.

A decoding step has streamed the model through every cache before, so what is done for a call counts: the
tensors are views of NumPy's memory, and few statements fill them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import add
from struct import Struct
from typing import cast

import numpy as np
from mlcbuild_format import abi
from numpy.typing import NDArray

from mlcbuild_runtime.devices import tensors
from mlcbuild_runtime.executor.batch import Masks

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

Floats = NDArray[np.float32]
MOST_STEPS = 16
"""Maximum decode steps in one call of the library."""


class IntTensors:
    """int32 tensors that every step has. They lie in one block, which is written at once."""

    def __init__(self) -> None:
        self._sizes: list[int] | None = None
        self._block, self._form = memoryview(b""), Struct("")
        self._tensors: list[tvm_ffi.Tensor] = []

    def tensors(self, *lists: list[int]) -> list[tvm_ffi.Tensor]:
        """Valid until the next call."""
        sizes = list(map(len, lists))
        if sizes != self._sizes:
            self._arrange(sizes)
        self._form.pack_into(self._block, 0, *chain.from_iterable(lists))
        return self._tensors

    def _arrange(self, sizes: list[int]) -> None:
        gaps = [-size % _LINE for size in sizes]
        starts = [0, *accumulate(map(add, sizes, gaps))]
        block = tensors.aligned(np.zeros(starts[-1], np.int32))
        parts = [f"{size}i{4 * gap}x" for size, gap in zip(sizes, gaps, strict=True)]
        self._sizes, self._block, self._form = sizes, block.data, Struct("=" + "".join(parts))
        views = [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._tensors = [tvm_ffi.from_dlpack(view) for view in views]


_LINE = tensors.ALIGNMENT // 4
_RANDOM = abi.SAMPLING_COLUMNS.index("random")
_ROW, _BITS = abi.MASK_ROW, abi.MASK_BITS


class ChoiceTensors:
    """What goes into the choice of tokens for so many rows, and what comes out of it."""

    def __init__(self, rows: int) -> None:
        self.ways = tensors.aligned(np.empty((rows, len(abi.SAMPLING_COLUMNS)), abi.SAMPLING_DTYPE))
        self.numbers = [way[_RANDOM:].data for way in self.ways]
        """The random number of each way, as something that is quickly set."""
        self.tokens = np.empty(rows, np.int32)
        self.tensors = [tvm_ffi.from_dlpack(array) for array in (self.ways, self.tokens)]


class LoopTensors:
    """What goes into several steps of so many sequences, and what comes out of them."""

    def __init__(self, rows: int) -> None:
        self.numbers = tensors.aligned(np.zeros((MOST_STEPS, rows)))
        self.tokens, self.heeds, self.taken, self.state = (
            tensors.aligned(np.zeros(shape, np.int32))
            for shape in (rows, rows, (MOST_STEPS, rows), len(abi.STATE_COLUMNS))
        )
        again = tensors.aligned(np.zeros(1, np.bool_)).reshape(())
        self.next, self.feed = tvm_ffi.from_dlpack(self.tokens), self.tokens.data
        arrays = {"numbers": self.numbers, "heeds": self.heeds, "taken": self.taken, "state": self.state}
        self.tensors = {
            name: tvm_ffi.from_dlpack(array) for name, array in {**arrays, "again": again}.items()
        }


class MaskTensors:
    """Masks as a library takes them: the row of each, then its bits. Each call overwrites the last one's."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], tuple[list[memoryview], tvm_ffi.Tensor]] = {}

    def tensor(self, masks: Masks) -> tvm_ffi.Tensor:
        size = len(masks), len(masks[0][1]) if masks else 0
        found = self._blocks.get(size)
        if found is None:
            block = np.empty((max(1, size[0]), _BITS + size[1]), np.int32)[: size[0]]
            found = self._blocks[size] = [row.data for row in block], tvm_ffi.from_dlpack(block)
        for own, (row, mask) in zip(found[0], masks, strict=True):
            own[_ROW], own[_BITS:] = row, mask.data
        return found[1]


def rows_of(logits: tvm_ffi.Tensor) -> Floats:
    return cast(Floats, np.from_dlpack(logits)[0])


def rows_tensor(rows: Sequence[object], one: object) -> tvm_ffi.Tensor:
    """int32, with as many rows, each like `one`."""
    return tvm_ffi.from_dlpack(tensors.aligned(np.array(rows or [one], np.int32))[: len(rows)])
