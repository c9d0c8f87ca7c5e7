"""The kernels that fill and read the cache, on ragged random batches, against plain NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tvm
from mlcbuild_format.abi import PAGE
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import ISAS, isa_for
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, size_var
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import kernel as product
from mlcbuild.compiler.cpu.kernels.linear import linear
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given
from mlcbuild.compiler.cpu.kernels.rope import Append, rope_append
from mlcbuild.compiler.program.ops import NO_WINDOW
from mlcbuild.targets import presets
from tests import emulation, kernelbench
from tests.libharness import EVERY, aligned
from tests.schemes import SCHEMES, pack

pytestmark = pytest.mark.xdist_group("attention")
"""Runs these tests in one process, which keeps compiled kernels for all of them."""

Array = NDArray[Any]
Reals = NDArray[np.float64]
LAYERS, LAYER = 3, 1
AMX = "x86-64-v4-amx"
TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "aarch64-linux")
RUNNABLE = [
    name for name in TARGETS if emulation.available() or kernelbench.runs_here(presets.resolve(name))
] or ["host"]


@dataclass(frozen=True)
class Case:
    """One shape of the attention kernel: query heads, KV heads, head dimension, and options."""

    heads: tuple[int, int, int]
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    rope_dim: int | None = None
    norm: bool = False
    bias: bool = False
    rounded: bool = False

    def __str__(self) -> str:
        extras = [f"window{self.window}" * bool(self.window), f"cap{self.softcap}" * bool(self.softcap)]
        flags = ["norm" * self.norm, "bias" * self.bias, f"rope{self.rope_dim}" * bool(self.rope_dim)]
        flags.append("rounded" * self.rounded)
        return "-".join(filter(None, ["x".join(map(str, self.heads)), self.dtype, *extras, *flags]))


CASES = [
    Case((9, 3, 64)),
    Case((8, 1, 80), window=37, rope_dim=20),
    Case((4, 4, 10), softcap=1.5, bias=True),
    Case((6, 2, 128), "float16", norm=True),
    Case((2, 2, 33 * 2), "float16", window=5, softcap=3.0, bias=True, norm=True),
]

ROUNDED = [
    Case((9, 3, 64), "float16", rounded=True),
    Case((8, 1, 96), window=37, softcap=1.5, rounded=True),
    Case((2, 2, 128), "float16", window=70, softcap=30.0, rounded=True),
    Case((6, 2, 32), rounded=True),
]
"""Cases that kernels with tile registers compute, where the processor has any."""


def shape(case: Case) -> Heads:
    return Heads(LAYERS, *case.heads, case.dtype)


def compiled(function: PrimFunc, target: str) -> Callable[..., None]:
    library = kernelbench.compiled(
        presets.resolve(target), [function.with_attr("global_symbol", "kernel")]
    ).library
    created: Callable[..., None] = library["kernel"]
    return created


@cache
def appending(case: Case, target: str) -> Callable[..., None]:
    isa, heads = isa_for(presets.resolve(target)), shape(case)
    query = Norm(isa, heads.dim, 1e-6, 1.0)
    norms = (query, replace(query, weight="float16")) if case.norm else None
    bias = "float16" if case.bias else None
    spec = Append(isa, heads, case.rope_dim or heads.dim, bias, norms)
    return compiled(rope_append(spec), target)


@cache
def attending(case: Case, target: str) -> Callable[..., None]:
    isa, heads = isa_for(presets.resolve(target)), shape(case)
    spec = AttentionKernel(isa, heads, heads.dim**-0.5, case.softcap, case.rounded)
    return compiled(attention(spec), target)


@dataclass(frozen=True)
class Batch:
    """The sequences of one call, each as (length before the call, number of new rows), with their pages of
    the KV cache.
    """

    parts: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, ...], ...]
    count: int

    @classmethod
    def of(cls, rng: np.random.Generator, parts: Sequence[tuple[int, int]]) -> Batch:
        needed = [-(-(before + new) // PAGE) for before, new in parts]
        order = [int(page) for page in rng.permutation(sum(needed) + 3)]
        starts = np.cumsum([0, *needed])
        pages = tuple(tuple(order[a:b]) for a, b in pairwise(starts))
        return cls(tuple(parts), pages, len(order))

    def slot(self, sequence: int, position: int) -> int:
        return self.pages[sequence][position // PAGE] * PAGE + position % PAGE


def turned(x: Reals, angles: Reals) -> Reals:
    """Returns the rotation of one head: pairs (i, i + half) of the first 2 * half dimensions."""
    half = len(angles) // 2
    cos, sin = angles[:half], angles[half:]
    a, b = x[:half], x[half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[2 * half :]])


def softmax_values(case: Case, query: Reals, keys: Reals, values: Reals) -> Reals:
    """Returns the attention output of one query at the position of the last key, computed in float64."""
    scores: Reals = keys @ query * case.heads[2] ** -0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.window:
        scores[: max(0, len(scores) - case.window)] = -np.inf
    weights = np.exp(scores - scores.max())
    actual: Reals = weights @ values / weights.sum()
    return actual


class World:
    """Random inputs of one case, and the results that the kernels must compute from them, in float64."""

    def __init__(self, case: Case, parts: Sequence[tuple[int, int]], seed: int) -> None:
        self.case, self.heads = case, shape(case)
        rng = self.rng = np.random.default_rng(seed)
        self.batch = Batch.of(rng, parts)
        self.bias = rng.standard_normal(self.heads.width).astype(np.float16)
        self.norms: list[Array] = [
            (rng.standard_normal(self.heads.dim) / 4).astype(dtype) for dtype in (np.float32, np.float16)
        ]
        lengths = [before + new for before, new in parts]
        self.inputs = [rng.standard_normal((n, self.heads.width)).astype(np.float32) for n in lengths]
        dim = case.rope_dim or self.heads.dim
        self.angles = rng.standard_normal((max(lengths), dim)).astype(np.float32)
        self.cache = aligned(np.full(self.heads.cache_shape(self.batch.count), np.nan, case.dtype))

    def rows(self, pick: Callable[[int, int], range]) -> list[tuple[int, int]]:
        """Returns (sequence, position) of the rows of a call."""
        return [(s, position) for s, part in enumerate(self.batch.parts) for position in pick(*part)]

    def append(
        self,
        target: str,
        rows: Sequence[tuple[int, int]],
        forks: Sequence[tuple[int, int, int]] = ((0, 0, 0),),
    ) -> Array:
        """Runs the kernel that fills the cache on these rows; returns qkv with rotated queries."""
        append = appending(self.case, target)
        qkv = aligned(np.stack([self.inputs[s][position] for s, position in rows]))
        slots = np.array([self.batch.slot(*row) for row in rows], np.int32)
        extras = [self.bias] * self.case.bias + self.norms * self.case.norm
        angles = np.stack([self.angles[position] for _, position in rows])
        inputs = [angles, slots, np.array(forks, np.int32), *extras]
        append(*map(device, inputs), share(qkv), share(self.cache), LAYER)
        return qkv

    def heads_of(self, sequence: int, position: int) -> tuple[Array, Array, Array]:
        """Returns expected queries, keys and values of a token, float64 [heads, dim]."""
        case, heads = self.case, self.heads
        x = self.inputs[sequence][position].astype(np.float64) + (self.bias if case.bias else 0)
        split = x.reshape(-1, heads.dim)
        q, k, v = np.split(split, [heads.query, heads.query + heads.kv])
        if case.norm:
            q, k = (
                rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight.astype(np.float64))
                for rows, weight in zip((q, k), self.norms, strict=True)
            )
        angles = self.angles[position].astype(np.float64)
        return np.stack([turned(row, angles) for row in q]), np.stack([turned(row, angles) for row in k]), v

    def expected(self, rows: Sequence[tuple[int, int]]) -> Array:
        heads, actual = self.heads, []
        tokens = {
            s: [self.heads_of(s, p) for p in range(sum(part))] for s, part in enumerate(self.batch.parts)
        }
        for sequence, position in rows:
            for head in range(heads.query):
                kv, observed = head // heads.group, tokens[sequence][: position + 1]
                keys, values = (
                    np.stack([token[which][kv] for token in observed])
                    .astype(self.case.dtype)
                    .astype(np.float64)
                    for which in (1, 2)
                )
                actual.append(softmax_values(self.case, observed[-1][0][head], keys, values))
        return np.array(actual).reshape(len(rows), -1)

    def attend(
        self, target: str, qkv: Array, rows: Sequence[tuple[int, int]], prompt: int | None = None
    ) -> Array:
        """Runs the attention kernel on rows. prompt: the argument of kernels that have a variant for
        prompts."""
        return self.attend_by(attending(self.case, target), qkv, rows, prompt)

    def attend_by(
        self,
        attend: Callable[..., None],
        qkv: Array,
        rows: Sequence[tuple[int, int]],
        prompt: int | None,
        columns: int = 0,
    ) -> Array:
        """Runs the given attention kernel on rows and returns its result. columns: number of columns of the
        result tensor, if it has more than the heads need.
        """
        batch, heads = self.batch, self.heads
        counts = [sum(s == sequence for s, _ in rows) for sequence in range(len(batch.parts))]
        indexes = [
            np.cumsum([0, *counts]),
            np.cumsum([0, *map(len, batch.pages)]),
            [page for pages in batch.pages for page in pages],
            [before + new for before, new in batch.parts],
            [position for _, position in rows],
        ]
        out = aligned(np.full((len(rows), columns or heads.query * heads.dim), np.nan, np.float32))
        arrays = [device(np.array(index, np.int32)) for index in indexes]
        numbers = [LAYER, self.case.window or NO_WINDOW, *([] if prompt is None else [prompt])]
        attend(share(qkv), share(self.cache), *arrays, *numbers, share(out))
        return out


def device(array: Array) -> Any:
    return share(aligned(np.ascontiguousarray(array)))


def share(array: Array) -> Any:
    return tvm.runtime.from_dlpack(array)


BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "decode": [(41, 1), (0, 1), (15, 1), (16, 1)],
    "prefill": [(0, 70)],
    "mixed": [(33, 20), (5, 1), (0, 17), (64, 3)],
    "parts": [(300, 1), (126, 1), (127, 1), (128, 1), (255, 3), (140, 14), (390, 2)],
}


PAIRS = [
    (case, target)
    for i, case in enumerate(CASES)
    for j, target in enumerate(RUNNABLE)
    if EVERY or (i - j) % len(RUNNABLE) == 0
]
"""Every case on some instruction set, and every instruction set with some case."""


@pytest.mark.parametrize(("case", "target"), PAIRS, ids=str)
def test_append_then_attend(case: Case, target: str) -> None:
    for seed, parts in enumerate(BATCHES.values()):
        world = World(case, parts, seed)
        old = world.rows(lambda before, new: range(before))
        if old:
            world.append(target, old)
        new = world.rows(lambda before, new: range(before, before + new))
        actual = world.attend(target, world.append(target, new), new)
        assert np.abs(actual - world.expected(new)).max() < (2e-3 if case.dtype == "float16" else 1e-5)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_sequence_gets_the_same_in_every_company(case: Case) -> None:
    """A sequence's results have the same bits whether it is computed alone or with others, one row at a time
    or a few at once.
    """
    target = next(target for other, target in PAIRS if other == case)
    world = World(case, [(20, 1), (250, 16), (129, 1)], 8)
    world.append(target, world.rows(lambda before, new: range(before)))
    rows = world.rows(lambda before, new: range(before, before + new))
    queries = world.append(target, rows)
    together = world.attend(target, queries, rows)
    for i, row in enumerate(rows):
        alone = world.attend(target, aligned(queries[i : i + 1]), [row])
        np.testing.assert_array_equal(alone[0], together[i])


def prompts(
    case: Case, parts: Sequence[tuple[int, int]], seed: int
) -> tuple[World, list[tuple[int, int]], Array]:
    """Returns (a World whose old rows are in the cache, its new rows, the queries of these rows)."""
    world = World(case, parts, seed)
    old = world.rows(lambda before, new: range(before))
    if old:
        world.append(AMX, old)
    rows = world.rows(lambda before, new: range(before, before + new))
    return world, rows, world.append(AMX, rows)


@pytest.mark.parametrize("case", ROUNDED if EVERY else ROUNDED[:2], ids=str)
def test_prompts_on_tile_registers(case: Case) -> None:
    """Queries, keys, values and weights have 8 bits: 2^-9 of a value on each side. A score, a sum of dim
    products over sqrt(dim), is off by as much of its own spread; where there are few keys, values of up to 4
    are off by 2^-7, and weights move by the errors of scores. Rows that are no prompt's are not rounded."""
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
    """A prompt's results have the same bits in one step, beside other sequences, in chunks, and row by
    row.
    """
    kernelbench.need(presets.resolve(AMX))
    world, rows, queries = prompts(case, [(20, 1), (50, 100), (129, 3)], 8)
    together = world.attend(AMX, queries, rows, prompt=1)
    for start, end in [(0, 1), (1, 8), (8, 60), (60, 101), (101, 104), (30, 31), (100, 101)]:
        actual = world.attend(AMX, aligned(queries[start:end]), rows[start:end], prompt=1)
        np.testing.assert_array_equal(actual, together[start:end])


def test_results_are_handed_on_as_tiles() -> None:
    """The product after attention finds the same, bit by bit, in the wide tensor in which attention packs
    prompts' rows, and leaves others as they are."""
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


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_forks_copy_what_a_page_begins_with(case: Case, target: str) -> None:
    """Copies of pages include rows that the same call has written, keep later tokens of the destination page,
    and are made one after the other.
    """
    for tokens in range(1, PAGE):
        worlds = [World(case, [(0, tokens), (tokens, PAGE - tokens), (tokens, 0)], 8) for _ in range(2)]
        rows = worlds[0].rows(lambda before, new: range(before, before + new))
        first, second, third = (pages[0] for pages in worlds[0].batch.pages)
        worlds[0].append(target, rows)
        worlds[1].append(target, rows, [(first, second, tokens), (second, third, tokens)])
        plain, forked = (world.cache.copy() for world in worlds)
        kv, dim = case.heads[1:]
        for page in (second, third):
            keys, values = (
                cache[LAYER, page, which].reshape(kv, *shape)
                for cache, which, shape in ((plain, 0, (dim, PAGE)), (plain, 1, (PAGE, dim)))
            )
            source = plain[LAYER, first]
            keys[:, :, :tokens] = source[0].reshape(kv, dim, PAGE)[:, :, :tokens]
            values[:, :tokens] = source[1].reshape(kv, PAGE, dim)[:, :tokens]
        np.testing.assert_array_equal(forked, plain)


@cache
def functions(target: str) -> Callable[[Array], Array]:
    """Returns exp, tanh and rounding to float16 of a vector of 256 values, one row each."""
    machine = presets.resolve(target)
    floats = Floats.dividing(isa_for(machine), 256)
    with kernel("functions") as created:
        rows = size_var("n")
        x = created.tensor("x", (rows, 256))
        wide = created.tensor("wide", (rows, 2, 256))
        half = created.tensor("half", (rows, 256), "float16")
        with created.body():
            from tvm.script.ir_builder import tirx as T

            with T.serial(rows) as row, T.serial(256 // floats.lanes) as k:
                value = T.bind(floats.load(x, row, k * floats.lanes))
                floats.store(wide, floats.exp(value), row, 0, k * floats.lanes)
                floats.store(wide, floats.tanh(value), row, 1, k * floats.lanes)
                floats.store(half, value, row, k * floats.lanes)
    run = compiled(created.func, target)

    def call(values: Array) -> Array:
        wide = aligned(np.zeros((len(values), 2, 256), np.float32))
        half = aligned(np.zeros((len(values), 256), np.float16))
        run(device(values), share(wide), share(half))
        return np.concatenate([wide, half[:, None].astype(np.float32)], 1)

    return call


@pytest.mark.parametrize("target", RUNNABLE)
def test_elementary_functions(target: str) -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate(
        [
            rng.uniform(-87, 88, 256),
            rng.uniform(-1, 1, 256),
            rng.standard_normal(256) * 1e-6,
            np.linspace(-9, 9, 256),
        ]
    ).astype(np.float32)
    actual = functions(target)(values.reshape(-1, 256))
    exact = values.astype(np.float64).reshape(-1, 256)
    assert np.abs(actual[:, 0] / np.exp(exact) - 1).max() < 2.5e-7
    assert np.abs(actual[:, 1] - np.tanh(exact)).max() < 2e-7


@pytest.mark.parametrize("target", RUNNABLE)
def test_rounding_to_float16_is_numpys(target: str) -> None:
    rng = np.random.default_rng(4)
    edges = [
        0.0,
        -0.0,
        65504.0,
        65519.0,
        65520.0,
        1e6,
        2**-14,
        2**-24,
        2**-25,
        2**-25 * 1.01,
        1.5 * 2**-24,
        6.1e-5,
    ]
    values = np.concatenate(
        [edges, np.negative(edges), rng.standard_normal(488) * 10.0 ** rng.integers(-9, 6, 488)]
    )
    values = values.astype(np.float32).reshape(-1, 256)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    assert np.array_equal(functions(target)(values)[:, 2], expected)


def test_tiles_waste_little_of_a_group() -> None:
    isa = next(isa for isa in ISAS if isa.name == "avx512vnni")
    groups = {1: 4, 2: 4, 3: 3, 4: 4, 5: 3, 6: 3, 7: 4, 8: 4, 9: 3, 12: 4}
    for group, tile in groups.items():
        spec = AttentionKernel(isa, Heads(1, 2 * group, 2, 64, "float16"), 1.0, None)
        assert (spec.tile, spec.capacity % tile) == (tile, 0)
