"""Tests of the argument tensors of library calls: their values, and that memory is reused."""

from __future__ import annotations

from typing import Any

import numpy as np
from mlcbuild_format import abi
from mlcbuild_runtime.devices.cpu_tensors import (
    BURST,
    IntTensors,
    MaskTensors,
    StepInputs,
    rows_of,
    rows_tensor,
)
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from numpy.typing import NDArray

STEP = ModelStep.of([([7, 8, 9], 18, [5, 2]), ([4], 1, [0])])
"""The inputs of a step of the model: three new tokens of a prompt whose 15 earlier tokens are in the KV
cache, and the first token of another sequence."""
DECODE = ModelStep.of([([7], 18, [5, 2]), ([4], 1, [0])])


def array(tensor: Any) -> NDArray[Any]:
    return np.from_dlpack(tensor)


def lists(tensors: dict[str, Any], *names: str) -> list[list[int]]:
    return [array(tensors[name]).tolist() for name in names]


def test_lists_become_aligned_tensors_that_are_reused() -> None:
    numbers = IntTensors()
    first = numbers.tensors([1, -2, 3], [], list(range(17)), [2**31 - 1])
    assert [array(tensor).tolist() for tensor in first] == [[1, -2, 3], [], [*range(17)], [2**31 - 1]]
    assert {str(array(tensor).dtype) for tensor in first} == {"int32"}
    addresses = [array(tensor).ctypes.data for tensor in first]
    assert [address % 64 for address in addresses] == [0] * 4
    again = numbers.tensors([4, 5, 6], [], [0] * 17, [9])
    assert [array(tensor).ctypes.data for tensor in again] == addresses
    assert [array(tensor).tolist() for tensor in again] == [[4, 5, 6], [], [0] * 17, [9]]
    assert [array(tensor).tolist() for tensor in numbers.tensors([1], [2])] == [[1], [2]]


def test_a_batch_has_positions_and_slots() -> None:
    inputs = StepInputs(page_size=16)
    arguments = inputs.batch(STEP)
    assert lists(arguments, "tokens", "logit_positions") == [[7, 8, 9, 4], [2, 3]]
    # 5 * 16 + 15, then the first tokens of page 2, and the first one of page 0.
    assert lists(arguments, "positions", "slots") == [[15, 16, 17, 0], [95, 32, 33, 0]]
    assert lists(arguments, "q_indptr", "page_indptr", "kv_lengths") == [[0, 3, 4], [0, 2, 3], [18, 1]]
    assert lists(arguments, "page_table") == [[5, 2, 0] + [0] * 61]
    assert {*arguments} == {argument.name for argument in abi.BATCH} - {"pages"} | {
        "tokens",
        "logit_positions",
    }


def test_page_tables_have_whole_multiples_of_64_entries() -> None:
    inputs = StepInputs(page_size=16)
    for pages, entries in ((64, 64), (65, 128)):
        table = range(1, pages + 1)
        (padded,) = lists(inputs.batch(ModelStep.of([([1], 16 * pages, table)])), "page_table")
        assert padded == [*table] + [0] * (entries - pages)


def test_masks_are_rows_of_an_index_and_bits() -> None:
    masks = MaskTensors()
    assert array(masks.tensor(())).shape == (0, abi.MASK_BITS)
    bits = [np.array([-1, 5], np.int32), np.array([0, 7], np.int32)]
    tensor = masks.tensor([(3, bits[0]), (1, bits[1])])
    assert array(tensor).tolist() == [[3, -1, 5], [1, 0, 7]]
    assert array(masks.tensor([(0, bits[1]), (2, bits[1])])).tolist() == [[0, 0, 7], [2, 0, 7]]
    assert masks.tensor([(0, bits[1]), (2, bits[1])]) is tensor


def test_forks_are_rows_of_three() -> None:
    inputs = StepInputs(page_size=16)
    assert array(inputs.forks(STEP)).shape == (0, 3)
    forked = STEP._replace(forks=[(1, 2, 3), (4, 5, 6)])
    assert array(inputs.forks(forked)).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_sampling_parameters_are_overwritten_by_the_next_step() -> None:
    inputs = StepInputs(page_size=16)
    rows = [(1.0, -2.0, 0.5, 40.0, 0.25), tuple(abi.SKIP)]
    sampling = inputs.sampling(rows)  # type: ignore[arg-type]
    params, tokens = (array(tensor) for tensor in sampling.tensors)
    assert params.tolist() == [list(row) for row in rows] and params.dtype == abi.SAMPLING_DTYPE
    assert tokens.shape == (2,) and tokens.dtype == np.int32
    assert inputs.sampling(rows[::-1]) is sampling  # type: ignore[arg-type]
    assert params.tolist() == [list(row) for row in rows[::-1]]
    assert len(inputs.sampling([abi.SKIP]).tokens) == 1


def test_a_loop_has_the_inputs_of_all_its_steps() -> None:
    inputs = StepInputs(page_size=16)
    rows = [(1.0, -2.0, 0.5, 40.0, 0.25), (0.0, -1.0, 1.0, 0.0, 0.75)]
    following = FollowingSteps([[0.1, 0.2], [0.3, 0.4]], [True, False], {9, 2})
    loop, arguments = inputs.loop(DECODE, rows, following, 3)
    assert {*arguments} == {*abi.STEPS.names} - {"pages", "params"}
    assert lists(arguments, "tokens", "stops_at_eos", "eos_tokens") == [[7, 4], [1, 0], [2, 9]]
    # done, pause after, limit
    assert lists(arguments, "state", "interrupt") == [[0, 3, 3], [0]]
    random = array(arguments["random_numbers"])
    assert random.shape == (BURST, 2) and random[1:3].tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert array(arguments["sampled_tokens"]).shape == (BURST, 2)
    assert array(arguments["continues"]).shape == () and array(arguments["masks"]).shape[0] == 0
    assert array(arguments["sampling_params"]).tolist() == [list(row) for row in rows]

    inputs.set_next(loop, 1, 11, 0.5)
    assert lists(arguments, "tokens") == [[7, 11]]
    assert array(arguments["sampling_params"])[:, -1].tolist() == [0.25, 0.5]

    assert inputs.loop(DECODE, rows, following, 3)[1]["eos_tokens"] is arguments["eos_tokens"]
    inputs.interrupt[0] = 1
    again, later = inputs.loop(DECODE, rows, FollowingSteps([], [False, False], {3}), 1)
    assert again is loop
    assert lists(later, "tokens", "stops_at_eos", "eos_tokens", "interrupt") == [[7, 4], [0, 0], [3], [1]]
    assert lists(later, "state") == [[0, 1, 1]]


def test_logits_lose_their_first_dimension_without_a_copy() -> None:
    logits = rows_tensor([[[1, 2, 3], [4, 5, 6]]], ())
    rows = rows_of(logits)
    assert rows.tolist() == [[1, 2, 3], [4, 5, 6]] and rows.ctypes.data == array(logits).ctypes.data
