"""Tests of the attention kernel for prompts that uses AMX tile registers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.linear import kernel as product
from mlcbuild.compiler.cpu.kernels.linear import linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given
from mlcbuild.targets import presets
from tests import kernelbench
from tests.compiler.attention_batches import Array, Case, World, device, shape, share
from tests.libharness import EVERY, aligned
from tests.schemes import SCHEMES, pack

pytestmark = pytest.mark.xdist_group("attention")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""


AMX = "x86-64-v4-amx"


ROUNDED = [
    Case((9, 3, 64), "float16", rounded=True),
    Case((8, 1, 96), window=37, softcap=1.5, rounded=True),
    Case((2, 2, 128), "float16", window=70, softcap=30.0, rounded=True),
    Case((6, 2, 32), rounded=True),
    Case((9, 3, 64), "int8", rounded=True),
    Case((2, 2, 96), "int8", window=70, softcap=30.0, rounded=True),
]
"""The configurations of attention whose prompts are computed with AMX tile registers on processors that have
them."""


def prompts(
    case: Case, parts: Sequence[tuple[int, int]], seed: int
) -> tuple[World, list[tuple[int, int]], Array]:
    """Prepares a test of attention. Returns (random inputs with the expected results, where the KV cache
    contains all tokens; (sequence, position) of each new token; the tensor with the queries of the new
    tokens). case: the kernel's configuration; parts: (tokens of a sequence before the call, its new
    tokens)."""
    world = World(case, parts, seed)
    old = world.rows(lambda before, new: range(before))
    if old:
        world.append(AMX, old)
    rows = world.rows(lambda before, new: range(before, before + new))
    return world, rows, world.append(AMX, rows)


@pytest.mark.parametrize("case", ROUNDED if EVERY else [*ROUNDED[:2], ROUNDED[-1]], ids=str)
def test_prompts_on_tile_registers(case: Case) -> None:
    """Checks attention of prompts with bfloat16 operands. Each of queries, keys, values and weights has 8
    significant bits, so it is off by up to 2^-9 of its value; the tolerances follow from sums of such errors.
    Rows that belong to no prompt are not rounded."""
    kernelbench.need(presets.resolve(AMX))
    for seed, parts in enumerate(
        [[(0, 70)], [(33, 20), (5, 1), (0, 17), (64, 3), (130, 90)], [(0, 0), (9, 1)]]
    ):
        world, rows, queries = prompts(case, parts, seed)
        expected = world.expected(rows)
        error = np.abs(world.attend(AMX, queries, rows, prompt=1) - expected)
        assert error.max() < 2**-5 and np.sqrt((error**2).mean()) < 2**-8
        assert np.abs(world.attend(AMX, queries, rows, prompt=0) - expected).max() < 2e-3


@pytest.mark.parametrize("case", ROUNDED[:2], ids=str)
def test_a_prompt_gets_the_same_however_it_is_cut(case: Case) -> None:
    """Checks that a prompt's results have the same bits whether it is computed in one step, beside other
    sequences, in chunks, or row by row."""
    kernelbench.need(presets.resolve(AMX))
    world, rows, queries = prompts(case, [(20, 1), (50, 100), (129, 3)], 8)
    together = world.attend(AMX, queries, rows, prompt=1)
    for start, end in [(0, 1), (1, 8), (8, 60), (60, 101), (101, 104), (30, 31), (100, 101)]:
        actual = world.attend(AMX, aligned(queries[start:end]), rows[start:end], prompt=1)
        np.testing.assert_array_equal(actual, together[start:end])


def test_results_are_handed_on_as_tiles() -> None:
    """Checks that the product after attention gives the same bits whether it reads plain rows or the wide
    tensor in which attention stores rows of prompts as tiles, and that other rows are unchanged."""
    kernelbench.need(presets.resolve(AMX))
    case, columns, target = ROUNDED[0], 1184, presets.resolve(AMX)
    isa, heads, scheme = isa_for(target), shape(case), SCHEMES["q4a8_1"]
    created, size = linear(isa, scheme, 40, heads.query * heads.dim), heads.dim**-0.5
    functions = {
        "attend": attention(AttentionKernel(isa, heads, size, case.softcap, case.rounded, columns)),
        "plain": product(created, Fusion()),
        "packed": product(created, Fusion(Given(columns))),
    }
    named = [function.with_attr("global_symbol", name) for name, function in functions.items()]
    library = kernelbench.compiled(target, named).library
    matrix = np.random.default_rng(3).standard_normal((created.n, created.k)).astype(np.float32)
    stored = [device(tensor) for tensor in pack(matrix, scheme)]
    for seed, parts in enumerate([[(9, 1)], [(20, 7)], [(3, 8)], [(33, 20), (5, 1)], [(0, 70)]]):
        world, rows, queries = prompts(case, parts, seed)
        for prompt in (0, 1):
            inputs = {
                "plain": world.attend(AMX, queries, rows, prompt),
                "packed": world.attend_by(library["attend"], queries, rows, prompt, columns),
            }
            by_name = {name: aligned(np.full((len(rows), created.n), np.nan, np.float32)) for name in inputs}
            for name, x in inputs.items():
                library[name](share(x), *stored, prompt, share(by_name[name]))
            assert np.isfinite(by_name["plain"]).all()
            np.testing.assert_array_equal(by_name["packed"], by_name["plain"])
