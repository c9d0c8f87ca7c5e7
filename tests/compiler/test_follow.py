"""Tests that compare the kernel which prepares the next decode step with plain Python."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.compiler.cpu.kernels.next_inputs import follow
from tests import kernelbench
from tests.kernelbench import TARGETS, Module

pytestmark = pytest.mark.xdist_group("kernels")
"""Makes pytest-xdist run these tests in one process, which compiles their kernels only once."""
PAGE, COLUMNS, NUMBER = 16, 5, 4


@dataclass
class Steps:
    tokens: list[int]
    lengths: list[int]
    steps_done: int
    most: int
    stops_at_eos: list[int]
    eos_tokens: list[int]
    interrupt: int
    pause: int = 99
    table: list[int] = field(init=False)
    starts: list[int] = field(init=False)
    positions: list[int] = field(init=False)
    slots: list[int] = field(init=False)
    random_numbers: list[float] = field(init=False)
    sampled_tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        count = [length // PAGE + 1 for length in self.lengths]
        self.starts = [sum(count[:row]) for row in range(len(count) + 1)]
        self.table = [7 * (sum(count) - entry) + 3 for entry in range(sum(count))]
        self.positions = [length - 1 for length in self.lengths]
        self.slots, self.random_numbers = [-5] * len(count), [0.25] * len(count)
        self.sampled_tokens = [[-9] * len(count) for _ in range(self.most)]

    def following(self, step: int) -> list[float]:
        return [step / 64 + row / 1024 for row in range(len(self.tokens))]

    def expected(self) -> tuple[Steps, bool]:
        after = copy.deepcopy(self)
        after.sampled_tokens[self.steps_done] = self.tokens
        after.steps_done += 1
        ended = any(
            token in self.eos_tokens and stops
            for token, stops in zip(self.tokens, self.stops_at_eos, strict=True)
        )
        if ended or min(self.tokens) < 0 or after.steps_done >= self.most:
            return after, False
        after.positions = self.lengths
        after.lengths = [length + 1 for length in self.lengths]
        pages = [
            self.table[start + place // PAGE] for start, place in zip(self.starts, self.lengths, strict=False)
        ]
        after.slots = [PAGE * page + place % PAGE for page, place in zip(pages, self.lengths, strict=True)]
        after.random_numbers = self.following(after.steps_done)
        return after, after.steps_done < self.pause and not self.interrupt

    def run(self) -> tuple[Steps, bool]:
        def ints(values: object) -> Any:
            return tvm.runtime.tensor(np.array(values, np.int32))

        sampling_params = np.arange(len(self.tokens) * COLUMNS, dtype=np.float64).reshape(-1, COLUMNS)
        sampling_params[:, NUMBER] = self.random_numbers
        numbers = [self.following(step) for step in range(self.most)]
        changed = [
            ints(self.positions),
            ints(self.slots),
            ints(self.lengths),
            tvm.runtime.tensor(sampling_params),
        ]
        changed += [ints(self.sampled_tokens), ints([self.steps_done, self.pause, self.most])]
        fixed = [
            ints(self.tokens),
            ints(self.starts),
            ints(self.table),
            tvm.runtime.tensor(np.array(numbers)),
        ]
        fixed += [ints(self.stops_at_eos), ints(np.array(self.eos_tokens, np.int32)), ints([self.interrupt])]
        continues: Any = tvm.runtime.tensor(np.zeros((), np.bool_))
        module().library["follow"](*fixed, *changed, continues)
        after, actual = copy.deepcopy(self), [tensor.numpy() for tensor in changed]
        after.positions, after.slots, after.lengths = (array.tolist() for array in actual[:3])
        after.random_numbers, after.sampled_tokens, after.steps_done = (
            actual[3][:, NUMBER].tolist(),
            actual[4].tolist(),
            int(actual[5][0]),
        )
        assert (actual[3][:, :NUMBER] == sampling_params[:, :NUMBER]).all() and actual[5][1:].tolist() == [
            self.pause,
            self.most,
        ]
        return after, bool(continues.numpy())


def module() -> Module:
    function = follow().with_attr("global_symbol", "follow")
    return kernelbench.once("follow", lambda: kernelbench.compiled(TARGETS["portable"], [function]))


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    size, most = draw(st.integers(1, 9)), draw(st.integers(1, 5))

    def numbers(least: int, largest: int, count: int) -> list[int]:
        return draw(st.lists(st.integers(least, largest), min_size=count, max_size=count))

    tokens = numbers(0, 40, size)
    if draw(st.integers(0, 7)) == 0:
        tokens[draw(st.integers(0, size - 1))] = -1
    ends = numbers(0, 40, draw(st.integers(0, 3)))
    stop = draw(st.sampled_from([0, 0, 0, 1]))
    created = draw(st.integers(0, most - 1))
    pause = draw(st.sampled_from([created + 1, most, 99]))
    return Steps(tokens, numbers(1, 70, size), created, most, numbers(0, 1, size), ends, stop, pause)


@given(steps())
def test_it_does_what_it_says(inputs: Steps) -> None:
    assert inputs.run() == inputs.expected()


def test_nobody_has_to_have_an_end() -> None:
    plain = Steps([3, 4], [16, 15], 0, 3, [1, 1], [], 0)
    after, more = plain.run()
    assert (
        more
        and after.sampled_tokens[0] == [3, 4]
        and after.slots[0] % PAGE == 0
        and after.slots[1] % PAGE == 15
    )
