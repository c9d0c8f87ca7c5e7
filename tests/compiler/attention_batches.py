"""Random batches for tests of the kernels that fill and read the KV cache, and the expected results, computed
in float64 with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import tvm
from mlcbuild_format.abi import PAGE
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.rope import Append, rope_append
from mlcbuild.compiler.program.ops import NO_WINDOW
from mlcbuild.targets import presets
from tests import emulation, kernelbench
from tests.libharness import EVERY, aligned

Array = NDArray[Any]


Reals = NDArray[np.float64]


LAYERS, LAYER = 3, 1


TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "aarch64-linux")


RUNNABLE = [
    name for name in TARGETS if emulation.available() or kernelbench.runs_here(presets.resolve(name))
] or ["host"]


@dataclass(frozen=True)
class Case:
    """One configuration of the attention kernel. heads: (query heads, KV heads, dimension of a head)."""

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
    Case((8, 1, 16), window=3),
    Case((4, 4, 10), softcap=1.5, bias=True),
    Case((6, 2, 128), "float16", norm=True),
    Case((2, 2, 33 * 2), "float16", window=5, softcap=3.0, bias=True, norm=True),
    Case((9, 3, 64), "int8"),
    Case((2, 1, 80), "int8", window=37, softcap=3.0, rope_dim=20, bias=True, norm=True),
    Case((2, 2, 96), "int8", window=5),
    Case((4, 1, 128), "int8", bias=True),
    Case((1, 1, 256), "int8", norm=True),
]


PAIRS = [
    (case, target)
    for i, case in enumerate(CASES)
    for j, target in enumerate(RUNNABLE)
    if EVERY or (i - j) % len(RUNNABLE) == 0
]
"""The (attention configuration, target processor) pairs that are tested. By default each configuration runs
on at least one target and each target with at least one configuration; with MLCBUILD_TEST_EVERY all pairs."""


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
    """The sequences of one kernel call: (length before the call, number of new rows) of each, and the pages
    of the KV cache that it uses."""

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
    """Returns vectors of heads, [tokens, heads, dimension], after a rotary embedding of the pairs (i, i +
    half), where 2 * half is the number of rotated dimensions. angles: cosines, then sines, of each token."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def softmax_values(case: Case, query: Reals, keys: Reals, values: Reals) -> Reals:
    """Returns the attention output of one query, computed in float64. The query's position is that of the
    last key."""
    scores: Reals = keys @ query * case.heads[2] ** -0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.window:
        scores[: max(0, len(scores) - case.window)] = -np.inf
    weights = np.exp(scores - scores.max())
    actual: Reals = weights @ values / weights.sum()
    return actual


class World:
    """The random inputs of one kernel test, and the results that the kernels must compute from them, in
    float64."""

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
        nan = -1 if self.heads.has_scales else np.nan  # bytes 0xFF, which are NaN if they are read as scales
        self.cache = aligned(np.full(self.heads.cache_shape(self.batch.count), nan, case.dtype))

    def rows(self, pick: Callable[[int, int], range]) -> list[tuple[int, int]]:
        """Returns (sequence, position) of each row of a call. pick: function of a sequence's (length before
        the call, number of new rows) that returns the positions."""
        return [(s, position) for s, part in enumerate(self.batch.parts) for position in pick(*part)]

    def append(
        self,
        target: str,
        rows: Sequence[tuple[int, int]],
        forks: Sequence[tuple[int, int, int]] = ((0, 0, 0),),
    ) -> Array:
        """Runs the kernel that appends rows to the KV cache, for the rows (sequence, position). Returns the
        input tensor qkv, in which queries are now rotated."""
        append = appending(self.case, target)
        qkv = aligned(np.stack([self.inputs[s][position] for s, position in rows]))
        slots = np.array([self.batch.slot(*row) for row in rows], np.int32)
        extras = [self.bias] * self.case.bias + self.norms * self.case.norm
        angles = np.stack([self.angles[position] for _, position in rows])
        inputs = [angles, slots, np.array(forks, np.int32), *extras]
        append(*map(device, inputs), share(qkv), share(self.cache), LAYER)
        return qkv

    def heads_of(self, sequence: int) -> tuple[Reals, Reals, Reals]:
        """Returns the expected queries, keys and values of the tokens of a sequence, float64 [tokens, heads,
        dimension]."""
        case, heads = self.case, self.heads
        x = self.inputs[sequence].astype(np.float64) + (self.bias if case.bias else 0)
        split = x.reshape(len(x), heads.query + 2 * heads.kv, heads.dim)
        q, k, v = np.split(split, [heads.query, heads.query + heads.kv], axis=1)
        if case.norm:
            q, k = (
                rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight.astype(np.float64))
                for rows, weight in zip((q, k), self.norms, strict=True)
            )
        angles = self.angles[: len(x)].astype(np.float64)
        return turned(q, angles), turned(k, angles), v

    def kept(self, sequence: int, exact: Sequence[Reals]) -> list[Reals]:
        """Returns the expected keys and values of the tokens of a sequence as the KV cache stores them,
        float64 [tokens, KV heads, dimension]. In a cache of 8-bit numbers, the stored numbers are returned
        after their rounding was checked. exact: the keys and the values before they are rounded."""
        if not self.heads.has_scales:
            return [rows.astype(self.case.dtype).astype(np.float64) for rows in exact]
        kept = []
        tokens = np.arange(len(exact[0]))
        pages, offsets = np.array(self.batch.pages[sequence], np.int64)[tokens // PAGE], tokens % PAGE
        for kind, rows in enumerate(exact):
            stored = self.cache[LAYER, pages, kind]
            codes, scales = np.split(stored, [PAGE * self.heads.dim], axis=2)
            scale = np.ascontiguousarray(scales).view(np.float32)[tokens, :, offsets].astype(np.float64)
            if kind == 0:
                code = codes.reshape(*rows.shape, PAGE)[tokens, :, :, offsets]
            else:
                code = codes.reshape(*rows.shape[:2], PAGE, self.heads.dim)[tokens, :, offsets]
            np.testing.assert_allclose(scale, np.abs(rows).max(2) / 127, rtol=1e-5)
            scale = scale[..., None]
            assert (np.abs(code * scale - rows) <= 0.5001 * scale + 1e-5).all()
            kept.append(code * scale)
        return kept

    def expected(self, rows: Sequence[tuple[int, int]]) -> Array:
        heads, actual = self.heads, []
        tokens = [self.heads_of(sequence) for sequence in range(len(self.batch.parts))]
        cached = [self.kept(sequence, exact) for sequence, (_, *exact) in enumerate(tokens)]
        for sequence, position in rows:
            keys, values = (kept[: position + 1] for kept in cached[sequence])
            for head in range(heads.query):
                kv, query = head // heads.group, tokens[sequence][0][position, head]
                actual.append(softmax_values(self.case, query, keys[:, kv], values[:, kv]))
        return np.array(actual).reshape(len(rows), -1)

    def attend(self, target: str, qkv: Array, rows: Sequence[tuple[int, int]], prompt: int = 0) -> Array:
        """Compiles the attention kernel for a target and runs it on rows (sequence, position). prompt: value
        of the argument `prompt`, not 0 for rows of prompts."""
        return self.attend_by(attending(self.case, target), qkv, rows, prompt)

    def attend_by(
        self,
        attend: Callable[..., None],
        qkv: Array,
        rows: Sequence[tuple[int, int]],
        prompt: int,
        columns: int = 0,
    ) -> Array:
        """Runs a compiled attention kernel on the queries `qkv` of the rows (sequence, position), and returns
        its float32 output, one row for each. prompt: value of the kernel's argument that selects the variant
        for prompts; columns: width of the output if it is more than heads * head
        size."""
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
        numbers = [LAYER, self.case.window or NO_WINDOW, prompt]
        attend(share(qkv), share(self.cache), *arrays, *numbers, share(out))
        return out


def device(array: Array) -> Any:
    return share(aligned(np.ascontiguousarray(array)))


def share(array: Array) -> Any:
    return tvm.runtime.from_dlpack(array)
