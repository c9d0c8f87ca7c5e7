"""Tests of drafting without a model: prompt lookup, clients' predictions, and estimating whether drafts save
time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_runtime.engine.drafts import Credit, Lookup, Odds, Prediction, Prices


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), count=st.integers(1, 9))
def test_lookup_is_what_followed_the_longest_known_end(tokens: list[int], count: int) -> None:
    lookup = Lookup()
    for end in range(1, len(tokens) + 1):
        text, actual = tokens[:end], lookup.propose(tokens[:end], count)
        expected = []
        for size in (4, 3, 2):
            places = [i for i in range(size, end) if size <= end and text[i - size : i] == text[end - size :]]
            if places:
                whole = text[:]
                for i in range(count):
                    whole.append(whole[places[-1] + i])
                expected = whole[end:]
                break
        assert actual == expected


@settings(max_examples=50)
@given(prices=st.lists(st.floats(0, 0.9), min_size=1), seed=st.integers(0, 1000))
def test_bad_drafts_cost_little(prices: list[float], seed: int) -> None:
    credit, source, cost, plain = Credit(), random.Random(seed), 0.0, 0
    for step in range(2000):
        count = credit.affordable(8)
        if count:
            price = prices[step % len(prices)]
            credit.settle(count, 0, price)
            cost += count * price
        else:
            credit.rest()
            plain += 1
        source.random()
    assert cost <= 1.5 + 0.02 * plain + 8


def test_good_drafts_grow() -> None:
    credit = Credit()
    lengths = []
    for _ in range(4):
        lengths.append(credit.affordable(16))
        credit.settle(lengths[-1], lengths[-1], 0.2)
    assert lengths == [4, 8, 16, 16]
    credit.settle(16, 3, 0.2)
    assert credit.affordable(16) == 4


def test_prices_come_from_times() -> None:
    prices = Prices()
    assert prices.price(1, 4) == pytest.approx(0.2)
    prices.observe(1, 0, 1.0)
    prices.observe(1, 4, 9.0)
    prices.observe(1, 4, 3.0)
    assert prices.price(1, 4) == pytest.approx(0.5)
    assert prices.price(4, 4) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("answer", "count", "expected"),
    [
        ([], 3, [1, 2, 3]),
        ([1, 2], 3, [3, 4, 5]),
        ([1, 2, 9], 3, []),
        ([1, 2, 9, 4, 5], 3, [6, 7, 8]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 3, []),
        ([9, 9, 1, 2], 2, [3, 4]),
    ],
)
def test_a_prediction_is_taken_up_again(answer: list[int], count: int, expected: list[int]) -> None:
    assert Prediction(range(1, 9)).propose(answer, count) == expected
    step_by_step = Prediction(range(1, 9))
    for size in range(len(answer) + 1):
        actual = step_by_step.propose(answer[:size], count)
    assert actual == expected


@given(tokens=st.lists(st.integers(0, 3), min_size=3, max_size=50), count=st.integers(1, 6))
def test_lookup_branches_where_something_else_followed(tokens: list[int], count: int) -> None:
    """Checks where branches leave a draft of prompt lookup: at tokens that followed the same n-gram earlier
    in the text, for the longest n-gram that has occurred."""
    lookup = Lookup()
    draft = lookup.propose(tokens, 5)
    left = count
    expected = []
    for begin, token in enumerate(draft):
        text = [*tokens, *draft[:begin]]
        entries: list[int] = []
        for size in (4, 3, 2):
            ngram = text[-size:]
            entries = [i for i in range(size, len(tokens)) if tokens[i - size : i] == ngram]
            if entries:
                break
        others = dict.fromkeys(tokens[i] for i in reversed(entries))
        for other in list(others)[:2]:
            if other != token and left > 0:
                place = max(i for i in entries if tokens[i] == other)
                expected.append((begin, tokens[place : place + min(left, 2)]))
                left -= len(expected[-1][1])
    assert [(each.start, each.tokens) for each in lookup.others(tokens, draft, count)] == expected


def test_as_many_tokens_as_rows_are_cheap() -> None:
    """Checks how many draft tokens speculative decoding chooses when kernels compute rows in groups of four:
    a step of up to four rows takes as long as one of a single row, and a step of eight as long as two groups
    of four."""
    prices = Prices()
    assert prices.best(1, 5) == 5  # nothing is known
    tried = []
    for _ in range(60):
        tried.append(prices.best(1, 9))
        prices.observe(1, tried[-1], 1.0 + (tried[-1] > 3) + 2 * (tried[-1] > 7))
        prices.observe(1, 0, 1.0)
    assert tried[-1] == 7
    assert (prices.best(1, 6), prices.best(1, 3), prices.best(1, 2), prices.best(1, 1)) == (3, 3, 2, 1)


def test_branches_are_drafted_while_they_pay() -> None:
    prices, odds = Prices(), Odds()
    assert odds.worthwhile(1.0, [prices.share(1, 2, more) for more in (1, 2)]) == 0  # nothing is known
    for _ in range(2):
        for drafted in range(5):
            prices.observe(1, drafted, 1.0 + 0.01 * drafted + (drafted > 3))
    assert prices.share(1, 2, 1) == pytest.approx(1.03 / 1.02 - 1)
    shares = [prices.share(1, 2, more) for more in (1, 2)]
    assert odds.worthwhile(1.0, shares) == 1  # two would begin a second group of rows
    for _ in range(2):
        prices.observe(1, 2, 1.12, 1)
    assert prices.share(1, 2, 1) == pytest.approx(1.12 / 1.02 - 1)  # a branch has its own price
    spent = 0.0
    for step in range(2000):
        count = odds.worthwhile(2.0, [0.02])
        spent += 0.02 * count
        odds.settle(count, 0, 2)
        assert step or count
    assert spent < 8  # of 4000 tokens, for branches that are never right
    for _ in range(40):
        odds.settle(2, 1, 3)
    assert odds.worthwhile(3.0, [0.1, 0.2]) == 2 and odds.pace == pytest.approx(3, abs=0.1)
