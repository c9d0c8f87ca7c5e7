"""Tests of the kernels that fill and read the KV cache, with random batches of sequences of different
lengths, compared with NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compiler.attention_batches import CASES, PAIRS, Case, World
from tests.libharness import aligned

pytestmark = pytest.mark.xdist_group("attention")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""


BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "decode": [(41, 1), (0, 1), (15, 1), (16, 1)],
    "prefill": [(0, 70)],
    "mixed": [(33, 20), (5, 1), (0, 17), (64, 3)],
    "parts": [(300, 1), (126, 1), (127, 1), (128, 1), (255, 3), (140, 14), (390, 2)],
}


@pytest.mark.parametrize(("case", "target"), PAIRS, ids=str)
def test_append_then_attend(case: Case, target: str) -> None:
    for seed, parts in enumerate(BATCHES.values()):
        world = World(case, parts, seed)
        old = world.rows(lambda before, new: range(before))
        if old:
            world.append(target, old)
        new = world.rows(lambda before, new: range(before, before + new))
        queries, expected = world.append(target, new), world.expected(new)
        for prompt in (0, 1):
            error = np.abs(world.attend(target, queries, new, prompt) - expected).max()
            assert error < (2e-3 if case.dtype == "float16" else 1e-5), (parts, prompt)


@pytest.mark.parametrize(("case", "target"), PAIRS[:6], ids=str)
def test_a_prompt_gets_the_same_however_it_is_cut(case: Case, target: str) -> None:
    """Checks that the attention output of prompt rows has the same bits whether they are computed in one
    step, beside other sequences, or in pieces, down to a single row."""
    world = World(case, [(20, 1), (37, 100), (129, 3)], 9)
    world.append(target, world.rows(lambda before, new: range(before)))
    rows = world.rows(lambda before, new: range(before, before + new))
    queries = world.append(target, rows)
    together = world.attend(target, queries, rows, prompt=1)
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 101), (101, 104)):
        actual = world.attend(target, aligned(queries[start:end]), rows[start:end], prompt=1)
        np.testing.assert_array_equal(actual, together[start:end])


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_sequence_gets_the_same_in_every_company(case: Case) -> None:
    """Checks that the attention output of a sequence has the same bits whether it is computed alone or in a
    batch with others, one row at a time or a few at once."""
    target = next(target for other, target in PAIRS if other == case)
    world = World(case, [(20, 1), (250, 16), (129, 1)], 8)
    world.append(target, world.rows(lambda before, new: range(before)))
    rows = world.rows(lambda before, new: range(before, before + new))
    queries = world.append(target, rows)
    together = world.attend(target, queries, rows)
    for i, row in enumerate(rows):
        alone = world.attend(target, aligned(queries[i : i + 1]), [row])
        np.testing.assert_array_equal(alone[0], together[i])
