"""Creates argument tensors for the calls of a CPU library once, and refills them for each call.

A decode step has just replaced the contents of every CPU cache by weights, so each Python statement between
two calls costs measurable time. Therefore the tensors are views of NumPy's memory, which few statements fill.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from operator import add
from struct import Struct
from typing import cast

import numpy as np
from mlcbuild_format import abi

from mlcbuild_runtime.devices import tensors
from mlcbuild_runtime.executor.batch import FollowingSteps, Masks, ModelStep
from mlcbuild_runtime.executor.sampling_params import Floats, SamplingRow

# tvm_ffi would import torch where it is installed, and compile an extension for it.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
import tvm_ffi

BURST = 16
"""Maximum number of decode steps in one call of a compiled library. `ci/bench/step` measures the overhead of
a call."""
_TABLE = 64
"""Page tables are padded to a multiple of this many entries, so that their shape rarely changes."""
_LINE = tensors.ALIGNMENT // 4
_RANDOM = abi.SAMPLING_COLUMNS.index("random")
_NUMBERS = (
    *("tokens", "logit_positions", "positions", "slots"),
    *("q_indptr", "page_indptr", "kv_lengths"),
)
"""Names of the int32 arguments, common to all library functions that compute a step of the model, whose
tensors lie in one memory block in this order."""

Arguments = dict[str, object]
"""Name of an argument of a function of a compiled library -> the value that is passed for it."""


class IntTensors:
    """Converts lists of integers to int32 tensors of one dimension, which are passed to a function of a
    compiled library. The tensors share one memory block, which one call of struct.pack_into fills."""

    def __init__(self) -> None:
        self._sizes: list[int] | None = None
        self._block, self._form = memoryview(b""), Struct("")
        self._tensors: list[tvm_ffi.Tensor] = []

    def tensors(self, *lists: list[int]) -> list[tvm_ffi.Tensor]:
        """Returns one int32 tensor for each list; the tensors are valid until the next call."""
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


class SamplingTensors:
    """Tensors for a fixed number of rows of logits: the sampling parameters of each row, and the tokens that
    the library samples from the rows."""

    def __init__(self, rows: int) -> None:
        self.params = tensors.aligned(np.empty((rows, len(abi.SAMPLING_COLUMNS)), abi.SAMPLING_DTYPE))
        self.random = [row[_RANDOM:].data for row in self.params]
        """A list with a memoryview of one float64 for each row of logits: the row's random number in [0, 1),
        which Python stores faster through a memoryview than into an array."""
        self.tokens = np.empty(rows, np.int32)
        self.tensors = [tvm_ffi.from_dlpack(array) for array in (self.params, self.tokens)]


class LoopTensors:
    """The input and output tensors of a loop of decode steps, for a fixed number of sequences."""

    def __init__(self, rows: int) -> None:
        self.random_numbers = tensors.aligned(np.zeros((BURST, rows)))
        self.tokens, self.stops_at_eos, self.sampled, self.state = (
            tensors.aligned(np.zeros(shape, np.int32))
            for shape in (rows, rows, (BURST, rows), len(abi.STATE_COLUMNS))
        )
        continues = tensors.aligned(np.zeros(1, np.bool_)).reshape(())
        self.next_tokens, self.feed = tvm_ffi.from_dlpack(self.tokens), self.tokens.data
        arrays = {
            "random_numbers": self.random_numbers,
            "stops_at_eos": self.stops_at_eos,
            "sampled_tokens": self.sampled,
            "state": self.state,
            "continues": continues,
        }
        self.tensors = {name: tvm_ffi.from_dlpack(array) for name, array in arrays.items()}


class MaskTensors:
    """Converts logit masks to int32 tensors [masks, 1 + words], the form that the library takes: the index of
    the row of logits, then one bit per token, 1 if it is allowed."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], tuple[list[memoryview], tvm_ffi.Tensor]] = {}

    def tensor(self, masks: Masks) -> tvm_ffi.Tensor:
        """Returns logit masks as one int32 tensor [masks, 1 + words]: the index of the row of logits, then
        one bit per token, 1 if it is allowed, lowest bits first. The tensor is valid until the next call."""
        size = len(masks), len(masks[0][1]) if masks else 0
        block = self._blocks.get(size)
        if block is None:
            array = np.empty((max(1, size[0]), abi.MASK_BITS + size[1]), np.int32)[: size[0]]
            block = self._blocks[size] = [row.data for row in array], tvm_ffi.from_dlpack(array)
        for words, (row, mask) in zip(block[0], masks, strict=True):
            words[abi.MASK_ROW], words[abi.MASK_BITS :] = row, mask.data
        return block[1]


class StepInputs:
    """Creates the arguments for the functions of a compiled CPU library, except the weights and the KV cache.
    One instance serves all calls, one after the other."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers, self._table, self._masks = IntTensors(), IntTensors(), MaskTensors()
        self._sampling: dict[int, SamplingTensors] = {}
        self._loops: dict[int, LoopTensors] = {}
        self._no_forks = rows_tensor([], (0, 0, 0))
        self._eos: tuple[Collection[int], tvm_ffi.Tensor] = (), rows_tensor([], 0)
        interrupt = tensors.aligned(np.zeros(1, np.int32))
        self.interrupt, self._interrupt = interrupt.data, tvm_ffi.from_dlpack(interrupt)
        """The flag that a running decode loop polls, as a memoryview of one int32; nonzero ends the loop."""

    def batch(self, step: ModelStep) -> Arguments:
        """Returns argument name -> tensor, for those arguments of the functions of a compiled library that
        describe a step: its tokens, the rows whose logits are computed, and where keys and values are stored.
        The tensors are valid until the next call."""
        places = step.places(self._page_size)
        numbers = self._numbers.tensors(
            step.tokens, step.rows, *places, step.indptr, step.page_indptr, step.lengths
        )
        (table,) = self._table.tensors(step.page_table + [0] * (-len(step.page_table) % _TABLE))
        arguments: Arguments = dict(zip(_NUMBERS, numbers, strict=True))
        arguments["page_table"] = table
        return arguments

    def forks(self, step: ModelStep) -> tvm_ffi.Tensor:
        return rows_tensor(step.forks, (0, 0, 0)) if step.forks else self._no_forks

    def masks(self, masks: Masks) -> tvm_ffi.Tensor:
        return self._masks.tensor(masks)

    def sampling(self, params: Sequence[SamplingRow]) -> SamplingTensors:
        tensors = self._sampling.get(len(params))
        if tensors is None:
            tensors = self._sampling[len(params)] = SamplingTensors(len(params))
        tensors.params[:] = params
        return tensors

    def loop(
        self, step: ModelStep, params: Sequence[SamplingRow], following: FollowingSteps, count: int
    ) -> tuple[LoopTensors, Arguments]:
        """Returns the data and the arguments of a loop of decode steps: (its random numbers, tokens and
        state, as arrays and tensors; name of an argument -> value, for the library functions that compute
        such a loop). Both are valid until the next call.

        step: the first step; params: sampling parameters of each sequence; following: random numbers of the
        later steps, and the tokens that end a sequence and with it the loop; count: maximum number of steps,
        the first one included, at most BURST.
        """
        arguments, loop = self.batch(step), self._loops.get(len(params))
        if loop is None:
            loop = self._loops[len(params)] = LoopTensors(len(params))
        if following.eos_tokens != self._eos[0]:
            self._eos = following.eos_tokens, rows_tensor(sorted(following.eos_tokens), 0)
        if following.random_numbers:
            loop.random_numbers[1 : 1 + len(following.random_numbers)] = following.random_numbers
        loop.tokens[:], loop.stops_at_eos[:] = step.tokens, following.stops_at_eos
        loop.state[:] = abi.LoopState(steps_done=0, pause_after=count, step_limit=count)
        arguments |= {"tokens": loop.next_tokens, "sampling_params": self.sampling(params).tensors[0]}
        arguments |= {
            "masks": self._masks.tensor(()),
            "eos_tokens": self._eos[1],
            "interrupt": self._interrupt,
        }
        arguments |= loop.tensors
        return loop, arguments

    def set_next(self, loop: LoopTensors, row: int, token: int, random_number: float) -> None:
        """Sets the input token and the random number, in [0, 1), of the sequence with index `row` for the
        next step of a decode loop."""
        loop.feed[row], self._sampling[len(loop.tokens)].random[row][0] = token, random_number


def rows_of(logits: tvm_ffi.Tensor) -> Floats:
    """Returns logits of the shape [1, rows, vocabulary] as a float32 array [rows, vocabulary] that shares
    their memory."""
    return cast(Floats, np.from_dlpack(logits)[0])


def rows_tensor(rows: Sequence[object], one: object) -> tvm_ffi.Tensor:
    """Returns a new int32 tensor: [rows, length] for lists of equal length, one for each row, or [rows] for
    integers. one: an example of such a list or integer, which decides the shape only if `rows` is empty."""
    return tvm_ffi.from_dlpack(tensors.aligned(np.array(rows or [one], np.int32))[: len(rows)])
