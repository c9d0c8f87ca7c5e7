"""Tests of answers under a constraint: their distribution is that of the allowed texts, and few masks are
computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from dataclasses import replace

import numpy as np
import pytest
from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.engine.request import Event, Request, Ticket
from mlcbuild_runtime.engine.sampler import Backoff
from mlcbuild_runtime.engine.sequence import Sequence, SequenceRows
from mlcbuild_runtime.executor.batch import Mask
from mlcbuild_runtime.executor.executor import StepOutput
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, Sample, Sampling

from .grammars import GRAMMARS, SIZE, TOKENIZERS, allowed_by
from .test_sampling import chi_squared


def sequence(sample: Sample, pattern: str, sampling: Sampling) -> Sequence:
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    request = Request((1,), 40, sampling)
    ticket = Ticket(lambda: None, None)
    return Sequence(request, lambda event: None, ticket, TOKENIZERS["json"], sample, matcher)


def told(sample: Sample, sequence: Sequence, row: Floats) -> Event:
    """Samples the next token from `row`, one row of logits (float32 [vocabulary]), under the sequence's token
    mask, appends the token to the sequence, and returns its event."""
    sequence.length = len(sequence.tokens) - 1
    logits, params = row[None].copy(), sequence.sampling_params(1)
    masks = [] if sequence.mask is None else [(0, sequence.mask)]
    result = StepOutput(sample(logits, params, masks), lambda: logits)
    return sequence.consume(SequenceRows(result, 0, 1))[0]


def answer(sample: Sample, sequence: Sequence, rows: Floats) -> tuple[int, ...]:
    for row in rows:
        assert told(sample, sequence, row).error is None
    return tuple(sequence.tokens[1:])


@pytest.mark.parametrize("top_k", [0, SIZE - 1])
def test_constrained_answers_are_as_likely_as_among_those_that_fit(sample: Sample, top_k: int) -> None:
    """Checks the distribution of answers under a constraint: with a filter, where a mask is computed at once,
    and without one, where the unconstrained sample is tried first."""
    pattern, draws, total = "[a-d][ef]{4}", np.random.default_rng(3), 4000
    rows = draws.normal(0, 0.5, (2, SIZE)).astype(np.float32)
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    entries = np.zeros(SIZE, np.bool_)
    entries[allowed_by(matcher)] = True
    rows[:, entries] += 4  # about half of what the model wants
    exact: dict[tuple[int, ...], float] = {}
    for first in allowed_by(matcher).nonzero()[0].tolist():
        after = matcher.after([first])
        for second in allowed_by(after).nonzero()[0].tolist():
            p, q = (
                np.exp(row[token]) / np.exp(row[allowed_by(open_)]).sum()
                for row, token, open_ in ((rows[0], first, matcher), (rows[1], second, after))
            )
            exact[first, second] = float(p * q)
    assert sum(exact.values()) == pytest.approx(1)
    counts = Counter(
        answer(sample, sequence(sample, pattern, Sampling(1.0, top_k=top_k, seed=seed)), rows)
        for seed in range(total)
    )
    assert chi_squared(counts, exact, total) < 5


def test_the_most_likely_of_those_that_fit(sample: Sample) -> None:
    draws, pattern = np.random.default_rng(5), "([a-z]{1,3} |[0-9]+;)*"
    rows = draws.standard_normal((12, SIZE)).astype(np.float32)
    actual = sequence(sample, pattern, Sampling(0))
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    for row in rows:
        assert not told(sample, actual, row).last
        expected = int(np.where(allowed_by(matcher), row, -np.inf).argmax())
        assert actual.tokens[-1] == expected
        matcher.take(expected)


def test_answers_that_follow_by_themselves_need_no_mask(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matcher, "_bits", None)
    text = "abcabcabcabc"
    for sampling in (Sampling(0), Sampling(1.0, seed=1)):
        follows = sequence(sample, "[abc]*", sampling)
        for token in TOKENIZERS["json"].vocabulary.encode(text, special=False)[1:]:
            row = np.zeros(SIZE, np.float32)
            row[token] = 100
            assert told(sample, follows, row).error is None


@pytest.mark.parametrize(("top_k", "follows", "expected"), [(0, False, 11), (0, True, 0), (5, True, 11)])
def test_masks_are_there_before_the_model_is_asked(
    sample: Sample, top_k: int, follows: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a mask is computed in advance where it will be needed: the sample before it violated the
    constraint, or cannot be tried without a mask."""
    monkeypatch.setattr(Backoff, "LONGEST", 1 << 30)
    actual = sequence(sample, "[ab]{50}", replace(Sampling(1.0, seed=1), top_k=top_k))
    token_id = TOKENIZERS["json"].vocabulary.token_id
    row, masks = np.zeros(SIZE, np.float32), 0
    row[token_id("a" if follows else "z")] = 100
    for _ in range(11):
        told(sample, actual, row)
        actual.length += 1
        masks += actual.sampling_params(1) != [SKIP] and actual.mask is not None
    assert abs(masks - expected) <= 3, "tries that are made between"


def test_where_a_text_must_come_no_mask_is_made(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    created, bits = list[Matcher](), Matcher._bits

    def counted(self: Matcher) -> Mask:
        created.append(self)
        return bits(self)

    monkeypatch.setattr(Matcher, "_bits", counted)
    actual, logits = sequence(sample, "[ab]hello[cd]", Sampling(0)), np.zeros((1, SIZE), np.float32)
    result = StepOutput(sample(logits, actual.sampling_params(1), []), lambda: logits)
    assert actual.advance(SequenceRows(result, 0, 1))
    assert actual.next_input() is None and len(created) == 1
    assert "".join(event.text for event in actual.take_events()) in ("ahello", "bhello")


def test_a_guess_leaves_logits_as_they_are(sample: Sample) -> None:
    """Checks that sampling a draft token leaves the row of logits unchanged. The row is needed afterwards to
    compute by how much the token is more likely than others."""
    actual, row = sequence(sample, "[ab]{9}", Sampling(0)), np.zeros(SIZE, np.float32)
    assert actual.propose(row) and not row.any()
    assert TOKENIZERS["json"].vocabulary.token_bytes(actual.draft.tokens[0]).strip(b"ab") == b""


def test_log_probabilities_are_of_all_tokens(sample: Sample) -> None:
    """Checks that log-probabilities cover the whole vocabulary: if they are requested, the library must not
    apply the mask to the logits."""
    actual = sequence(sample, "[ab]{50}", Sampling(0, top_k=5))
    actual.request = replace(actual.request, logprobs=1, sampling=Sampling(1.0, top_k=5, seed=1))
    row = np.zeros(SIZE, np.float32)
    row[TOKENIZERS["json"].vocabulary.token_id("z")] = 100
    event = told(sample, actual, row)
    assert actual.mask is None and event.text in "ab" and event.logprob is not None
    assert event.logprob.logprob == pytest.approx(-100)
    assert event.alternatives[0].logprob == pytest.approx(0)


def test_backoff_skips_more_tokens_after_each_violation() -> None:
    """Checks that, under a constraint, sampling without a token mask is tried less often after tokens that
    violated the grammar, and more often again after successes."""

    def tries(fits: List[bool], start: int) -> list[bool]:
        results = []
        for place, fit in enumerate(fits, start):
            results.append(backoff.due(place))
            if results[-1]:
                backoff.settle(place, fit)
        return results

    backoff = Backoff()
    assert all(tries([True] * 20, 0))
    assert 5 <= sum(tries([False] * 100, 20)) <= 7
    assert sum(tries([True] * 100, 120)) > 70
