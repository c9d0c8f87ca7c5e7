"""Tests of the kernels that write and copy pages of the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
from mlcbuild_format.abi import PAGE

from tests.compiler.attention_batches import CASES, LAYER, PAIRS, RUNNABLE, Case, World

pytestmark = pytest.mark.xdist_group("attention")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""


def test_append_touches_its_layer_and_slots_only() -> None:
    world = World(CASES[0], [(3, 14)], 7)
    rows = world.rows(lambda before, new: range(before, before + new))
    world.append(RUNNABLE[0], rows)
    written = ~np.isnan(world.cache)
    assert not written[[0, 2]].any()
    keys, values = (written[LAYER, :, which].reshape(world.batch.count, 3, -1) for which in (0, 1))
    assert keys.sum() == values.sum() == 14 * 3 * 64
    first, second = world.batch.pages[0]
    by_token = keys[first].reshape(3, 64, PAGE)
    assert by_token[:, :, 3:].all() and not by_token[:, :, :3].any()
    assert values[second].reshape(3, PAGE, 64)[:, :1].all()


@pytest.mark.parametrize(("case", "target"), PAIRS, ids=str)
def test_forks_copy_what_a_page_begins_with(case: Case, target: str) -> None:
    """Checks that copies of pages include rows which the same call has written, keep later tokens of the
    destination page, and are made in order."""
    for tokens in range(1, PAGE):
        worlds = [World(case, [(0, tokens), (tokens, PAGE - tokens), (tokens, 0)], 8) for _ in range(2)]
        rows = worlds[0].rows(lambda before, new: range(before, before + new))
        first, second, third = (pages[0] for pages in worlds[0].batch.pages)
        worlds[0].append(target, rows)
        worlds[1].append(target, rows, [(first, second, tokens), (second, third, tokens)])
        plain, forked = (world.cache.copy() for world in worlds)
        kv, dim = case.heads[1:]
        source = plain[LAYER, first]
        for page in (second, third):
            # Assigning to a part of `target` writes through views into the array `plain`.
            target_page, numbers = plain[LAYER, page], PAGE * dim
            for head in range(kv):
                keys, old_keys = (
                    each[0, head, :numbers].reshape(dim, PAGE) for each in (target_page, source)
                )
                keys[:, :tokens] = old_keys[:, :tokens]
                target_page[1, head, : tokens * dim] = source[1, head, : tokens * dim]
                scales = slice(numbers, numbers + 4 * tokens)  # empty but for int8
                target_page[:, head, scales] = source[:, head, scales]
        np.testing.assert_array_equal(forked, plain)
