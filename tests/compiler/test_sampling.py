"""Tests of the kernel that samples tokens, on every instruction set, compared with float64 NumPy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_format.abi import INVALID_TOKEN, NO_TOKEN
from numpy.typing import NDArray

from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels.logit_mask import masked
from mlcbuild.compiler.cpu.kernels.sampling import sample
from mlcbuild.targets.target import Target
from tests import kernelbench
from tests.kernelbench import TARGETS, Module
from tests.libharness import EVERY

pytestmark = pytest.mark.xdist_group("kernels")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""

Floats = NDArray[np.float32]
Reals = NDArray[np.float64]
EXACT = 2e-6
"""Tolerance of probabilities: a token that a kernel samples in float32 is accepted if its interval of
cumulative probability, computed in float64, is at most this far from the random number."""
EXAMPLES = 400 if EVERY else 12
SAME = {
    **dict.fromkeys(("avx512", "avx512amx"), "avx512vnni"),
    "avxvnni": "avx2",
    "neon": "portable",
    "i8mm": "portable",
}
"""Name of an instruction set -> another one for which the sampling kernel is the same program."""
each_isa = pytest.mark.parametrize("isa", [name for name in TARGETS if EVERY or name not in SAME])
two_isas = pytest.mark.parametrize("isa", ["avx512vnni", "portable"])


@dataclass(frozen=True)
class Way:
    """The sampling parameters of one row of logits."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    number: float = 0.5

    @property
    def columns(self) -> tuple[float, ...]:
        if not self.temperature:
            return 0.0, -math.inf, 1.0, 0.0, self.number
        drop = self.temperature * math.log(self.min_p) if self.min_p else -math.inf
        return 1 / self.temperature, drop, self.top_p, float(self.top_k), self.number


def kept(logits: Floats, way: Way, slack: float) -> Reals:
    """Returns the unnormalized probability of each token after the filters top_k, min_p and top_p, computed
    in float64 by their definitions; 0 for an excluded token. slack: tolerance of the comparisons with min_p
    and top_p, so that a token at the limit counts as kept."""
    wide = logits.astype(np.float64)
    weights: Reals = np.exp((wide - wide.max()) / way.temperature)
    if 0 < way.top_k < len(wide):
        weights[wide < np.sort(wide)[-way.top_k]] = 0
    weights[weights < min(1.0, way.min_p * (1 - slack))] = 0
    if way.top_p < 1:
        order = np.argsort(-wide, kind="stable")
        sums = np.cumsum(weights[order]) / weights.sum()
        enough = int(np.searchsorted(sums, min(1.0, way.top_p + slack)))
        weights[wide < wide[order[min(enough, len(order) - 1)]]] = 0
    return weights


def misses(logits: Floats, way: Way, token: int) -> float:
    """Returns how far the random number that selects the token lies outside of the token's interval of
    cumulative probability; negative if it lies inside. logits: row of logits; way: sampling parameters with
    the random number (0 to 1); token: id of the sampled token."""
    best = math.inf
    for slack in (0, -EXACT, EXACT):  # another one where a token lies at the edge of a filter
        weights = kept(logits, way, slack)
        sums = np.cumsum(weights) / weights.sum()
        low = sums[token] - weights[token] / weights.sum()
        if weights[token] > 0:
            best = min(best, max(low - way.number, way.number - sums[token]))
        if best < EXACT:
            break
    return best


def module(isa: str) -> Module:
    function = sample(isa_for(TARGETS[isa])).with_attr("global_symbol", "sample")
    return kernelbench.once(f"sampling {isa}", lambda: kernelbench.compiled(TARGETS[isa], [function]))


@pytest.mark.parametrize(("isa", "other"), SAME.items())
def test_the_kernel_is_that_of_another_instruction_set(isa: str, other: str) -> None:
    """Checks that the sampling kernel is the same program for two instruction sets, so that tests which
    execute it on one of them hold for both."""
    assert sample(isa_for(TARGETS[isa])).script() == sample(isa_for(TARGETS[other])).script()


def tokens(isa: str, logits: Floats, ways: list[tuple[float, ...]]) -> list[int]:
    inputs = [tvm_ffi.from_dlpack(array) for array in (logits[None], np.array(ways, np.float64))]
    out: Any = tvm.runtime.tensor(np.full(len(logits), -9, np.int32))
    module(isa).library["sample"](*inputs, out)
    actual: list[int] = out.numpy().tolist()
    return actual


def chosen(isa: str, logits: Floats, way: Way) -> int:
    return tokens(isa, logits[None], [way.columns])[0]


def check(isa: str, logits: Floats, way: Way) -> None:
    token = chosen(isa, logits, way)
    if way.temperature == 0:
        assert token == logits.argmax()
    else:
        assert misses(logits, way, token) < EXACT, (token, way)


@dataclass(frozen=True)
class Drawn:
    """The parameters from which a random row of logits is generated."""

    size: int
    spread: float
    rounded: bool
    masked: float
    seed: int

    @property
    def logits(self) -> Floats:
        random = np.random.default_rng(self.seed)
        actual = (random.standard_normal(self.size) * self.spread).astype(np.float32)
        actual = np.round(actual) if self.rounded else actual
        actual[random.random(self.size) < self.masked] = -np.inf
        actual[random.integers(self.size)] = np.float32(0.5 * self.spread)
        return actual


ways = st.builds(
    Way,
    temperature=st.sampled_from([0.0, 1.0, 0.7, 1.5, 0.1, 1e-3, 1e3]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 300, 5000]),
    number=st.floats(0, 1, exclude_max=True),
)
drawn = st.builds(
    Drawn,
    size=st.sampled_from([1, 2, 7, 17, 255, 256, 257, 4097, 9001]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 1e4]),
    rounded=st.booleans(),
    masked=st.sampled_from([0.0, 0.0, 0.5, 0.999]),
    seed=st.integers(0, 1 << 30),
)


@each_isa
@settings(max_examples=EXAMPLES, deadline=None)
@given(way=ways, drawn=drawn)
def test_every_filter_by_its_definition(isa: str, way: Way, drawn: Drawn) -> None:
    kernelbench.need(TARGETS[isa])
    check(isa, drawn.logits, way)


@two_isas
@pytest.mark.parametrize(("size", "spread"), [(49152, 1.0), (49152, 3.0), (151936, 2.0)])
def test_vocabularies_of_models(isa: str, size: int, spread: float) -> None:
    kernelbench.need(TARGETS[isa])
    logits = Drawn(size, spread, False, 0.0, 1).logits
    for way in (Way(), Way(0.7, top_p=0.9), Way(top_k=40), Way(top_k=3000), Way(min_p=0.05), Way(0.0)):
        check(isa, logits, replace(way, number=0.3))


@two_isas
def test_a_row_is_the_same_among_others_and_wherever_it_lies(isa: str) -> None:
    """Checks that a row's token depends neither on the other rows nor on the row's address, where rows have
    an odd number of logits, and that a row can be skipped."""
    kernelbench.need(TARGETS[isa])
    random = np.random.default_rng(3)
    logits = np.stack([Drawn(5001, spread, False, 0.1, 4).logits for spread in (0.5, 1, 2, 3, 4, 5, 6)])
    for way in (Way(), Way(top_p=0.9), Way(top_k=1500), Way(min_p=0.01), Way(0.0)):
        columns = [replace(way, number=float(number)).columns for number in random.random(len(logits))]
        alone = [tokens(isa, row[None], [each])[0] for row, each in zip(logits, columns, strict=True)]
        assert tokens(isa, logits, columns) == alone
        assert tokens(isa, logits[2:4], columns[2:4]) == alone[2:4]
        skipped = [(-1.0, *columns[0][1:]), *columns[1:]]
        assert tokens(isa, logits, skipped) == [NO_TOKEN, *alone[1:]]


@two_isas
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_rows_that_are_not_numbers(isa: str, value: float) -> None:
    """Checks that a NaN anywhere in a row of logits makes that row's token invalid, and no other row's."""
    kernelbench.need(TARGETS[isa])
    plain = Drawn(700, 1.0, False, 0.0, 1).logits
    for way in (Way(), Way(0.0), Way(top_p=0.5), Way(top_k=5)):
        good = chosen(isa, plain, way)
        for place in (0, 255, 400, 699):
            logits = np.stack([plain] * 3)
            logits[1, place] = value
            assert tokens(isa, logits, [way.columns] * 3) == [good, INVALID_TOKEN, good]
        nothing = np.full((1, 700), -np.inf, np.float32)
        assert tokens(isa, nothing, [way.columns]) == [INVALID_TOKEN]


@two_isas
def test_numbers_at_the_edges_choose_no_impossible_token(isa: str) -> None:
    kernelbench.need(TARGETS[isa])
    logits = np.full(600, -np.inf, np.float32)
    logits[[5, 300]] = 1.0
    assert [chosen(isa, logits, Way(number=number)) for number in (0.0, 0.499, 0.501)] == [5, 5, 300]
    assert chosen(isa, logits, Way(number=math.nextafter(1, 0))) == 300
    logits[300] = -100.0
    assert chosen(isa, logits, Way(number=math.nextafter(1, 0))) == 5


@two_isas
def test_extreme_logits_and_temperatures(isa: str) -> None:
    kernelbench.need(TARGETS[isa])
    largest = float(np.finfo(np.float32).max)
    logits = np.array([-largest, largest, 0, -np.inf, 1e-45, largest], np.float32)
    for scale in (1e-30, 1.0, 1e30):
        for rest in ((-math.inf, 1.0, 0.0), (-math.inf, 0.9, 2.0), (-1 / scale, 0.5, 5.0)):
            names = {tokens(isa, logits[None], [(scale, *rest, number)])[0] for number in (0.0, 0.9)}
            assert names <= ({0, 1, 2, 4, 5} if scale < 1 else {1, 5})
    close = np.array([1e-42, 2e-42, 0.0], np.float32)
    assert chosen(isa, close, Way(1e-30, top_p=0.5, top_k=2)) in {0, 1, 2}


@two_isas
def test_what_is_drawn_often_is_likely(isa: str) -> None:
    """Checks that 20,000 sampled tokens have the expected distribution, with a chi-squared test."""
    kernelbench.need(TARGETS[isa])
    logits, total = Drawn(600, 1.0, False, 0.0, 7).logits, 20_000
    numbers = np.random.default_rng(9).random(total).tolist()
    for way in (Way(), Way(0.8, top_p=0.6), Way(1.3, min_p=0.05, top_k=90)):
        exact = kept(logits, way, 0)
        exact /= exact.sum()
        drawn = tokens(isa, np.repeat(logits[None], total, 0), [(*way.columns[:4], n) for n in numbers])
        counts = np.bincount(drawn, minlength=600)
        assert not counts[exact == 0].any()
        common = exact * total >= 5
        statistic = ((counts - exact * total)[common] ** 2 / (exact * total)[common]).sum()
        assert abs(statistic - common.sum()) / math.sqrt(2 * common.sum()) < 5


@each_isa
def test_no_library_is_called(isa: str) -> None:
    assert kernelbench.libraries_called(module(isa).asm) == set()
    if isa == "portable":
        assert not re.search(r"%[yz]mm|\bv[a-z]+\s.*%xmm", module(isa).asm)


@pytest.mark.parametrize(
    "target",
    [
        Target("t", "aarch64-unknown-linux-gnu", "neoverse-n1"),
        Target("t", "arm64-apple-macosx14.0.0", "apple-m1"),
        Target("t", "riscv64-unknown-linux-gnu", "generic-rv64", ("+d", "+m")),
    ],
    ids=["neoverse-n1", "apple-m1", "riscv64"],
)
def test_other_architectures(target: Target) -> None:
    """Checks that the sampling kernel compiles for other architectures without calls of libraries. It is not
    executed."""
    function = sample(isa_for(target)).with_attr("global_symbol", "sample")
    assert kernelbench.libraries_called(kernelbench.compiled(target, [function]).asm) == set()


def test_threads_do_not_show() -> None:
    """Checks that the sampled tokens are the same with one and with two threads."""
    kernelbench.need(TARGETS["portable"])
    logits = np.stack([Drawn(20_000, 2.0, False, 0.0, seed).logits for seed in range(5)])
    ways = [Way(number=0.2), Way(top_p=0.9), Way(0.0), Way(top_k=700), Way(min_p=0.1, number=0.9)]
    set_threads = tvm.get_global_func("runtime.config_threadpool")
    results = []
    try:
        for count in (1, 2):
            set_threads(1, count)
            assert count > 1 or tvm.get_global_func("runtime.NumThreads")() == 1
            results.append(tokens("portable", logits, [way.columns for way in ways]))
    finally:
        set_threads(1, 0)  # the default number
    assert results[0] == results[1] and len(results[0]) == 5


@pytest.mark.parametrize("width", [1, 31, 33, 260, 4103])
@each_isa
def test_masked_logits(isa: str, width: int) -> None:
    """Checks the kernel that sets masked logits to minus infinity: rows without a mask stay unchanged, and a
    mask may have more bits than a row has logits."""
    kernelbench.need(TARGETS[isa])
    function = masked(isa_for(TARGETS[isa])).with_attr("global_symbol", "masked")
    created = kernelbench.once(f"masks {isa}", lambda: kernelbench.compiled(TARGETS[isa], [function]))
    rng = np.random.default_rng(width)
    for count in (0, 1, 3):
        logits = rng.standard_normal((4, width)).astype(np.float32)
        words = rng.integers(-(1 << 31), 1 << 31, (max(1, count), 2 + width // 32), dtype=np.int32)[:count]
        words[:, 0] = rows = rng.permutation(4)[:count]
        expected = logits.copy()
        for row, mask in zip(rows, words[:, 1:], strict=True):
            bits = np.unpackbits(mask.copy().view(np.uint8), count=width, bitorder="little")
            expected[row, bits == 0] = -np.inf
        actual: Any = tvm.runtime.tensor(logits)
        created.library["masked"](tvm_ffi.from_dlpack(words), actual)
        assert np.array_equal(actual.numpy(), expected)
