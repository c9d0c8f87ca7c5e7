"""Tests of dividing the computation of prompts into turns: the rules, and their effect on slow and fast
machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlcbuild_runtime.engine.prompt_turns import ROW_MULTIPLE, SMALLEST, TURN_SECONDS, TurnLength, allot

ROOT = Path(__file__).parents[2]
LAST = "first token, last of all, s"
PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3000)), max_size=9).map(
    lambda prompts: sorted(prompts, key=lambda prompt: prompt[0])
)


@given(PROMPTS, st.integers(0, 600))
def test_a_turn_is_full_and_no_larger(prompts: list[tuple[int, int]], room: int) -> None:
    counts = allot(prompts, room)
    assert all(0 <= count <= left for count, (_, left) in zip(counts, prompts, strict=True))
    assert sum(counts) == min(room, sum(left for _, left in prompts))


@given(PROMPTS, st.integers(1, 600))
def test_the_oldest_prompt_gets_half_of_each_turn(prompts: list[tuple[int, int]], room: int) -> None:
    if prompts:
        assert allot(prompts, room)[0] >= min(prompts[0][1], room / 2)


@pytest.mark.parametrize(
    ("prompts", "counts"),
    [
        ([], []),
        ([(0, 300)], [256]),
        ([(0, 4000), (0, 128)], [128, 128]),
        ([(0, 4000), (0, 900), (0, 100)], [128, 28, 100]),
        ([(0, 4000), (0, 100), (0, 100)], [128, 100, 28]),
        ([(0, 50), (0, 900), (0, 100)], [50, 106, 100]),
        ([(0, 4000), (0, 500), (1, 10)], [128, 128, 0]),
    ],
)
def test_the_shortest_prompts_get_the_rest(prompts: list[tuple[int, int]], counts: list[int]) -> None:
    assert allot(prompts, 256) == counts


def test_a_turn_is_as_long_as_the_last_one_says() -> None:
    length = TurnLength(256)
    assert length.tokens(alone=False) == 256
    length.record(256, 256 / 1000)  # 1,000 tokens/s
    tokens = length.tokens(alone=False)
    assert 0 <= TURN_SECONDS * 1000 - tokens < ROW_MULTIPLE and tokens % ROW_MULTIPLE == 0
    assert length.tokens(alone=True) == 256
    length.record(5, 5.0)  # too few tokens to tell
    assert length.tokens(alone=False) == tokens
    length.record(tokens, 100.0)
    assert length.tokens(alone=False) == SMALLEST
    length.record(SMALLEST, 1e-9)
    assert length.tokens(alone=False) == 256


def test_a_small_limit_holds() -> None:
    length = TurnLength(20)
    length.record(20, 9.0)
    assert length.tokens(alone=False) == length.tokens(alone=True) == 20


def test_the_policy_on_slow_and_fast_machines() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "ci" / "bench" / "turns", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(result.stdout)
    assert len(results) == 3
    for many, beside_long in (by_load.values() for by_load in results.values()):
        for engine, served_in_order in (many.values(), beside_long.values()):
            assert engine["answer tokens/s"] > 0.95 * served_in_order["answer tokens/s"]
        engine, served_in_order = many.values()
        assert engine["longest pause, s"] < 1.3 * TURN_SECONDS
        assert engine["first token p90, s"] < 1.05 * served_in_order["first token p90, s"]
        engine, served_in_order = beside_long.values()
        assert engine[LAST] < served_in_order[LAST] / 3
        assert engine["long prompt, s"] < 2 * served_in_order["long prompt, s"]
