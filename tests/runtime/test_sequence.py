"""Tests of one sequence without an engine: tokens, drafts, the end of an answer, events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.engine.sequence import SequenceRows
from mlcbuild_runtime.executor.executor import StepOutput
from mlcbuild_runtime.executor.sampling_params import SKIP, Sampling

from .scripted import GREEDY, Words, logits_of, rows, sequence

REQUEST = Request((1, 2, 3), 4, GREEDY)


def test_a_step_appends_the_drawn_token() -> None:
    seq, _ = sequence(REQUEST)
    (event,) = seq.consume(rows(seq, logits_of(5)))
    assert (seq.tokens, seq.length, seq.complete) == ([1, 2, 3, 5], 3, False)
    assert (event.text, event.tokens, event.last) == ("f", 1, False)


@pytest.mark.parametrize(
    ("request_", "token", "text", "finish"),
    [
        (replace(REQUEST, max_tokens=1), 5, "f.", "length"),
        (REQUEST, 7, ".", "stop"),
        (replace(REQUEST, ignore_eos=True), 7, "h", None),
        (replace(REQUEST, stop=("c",)), 2, "", "stop"),
    ],
)
def test_where_an_answer_ends(request_: Request, token: int, text: str, finish: str | None) -> None:
    seq, _ = sequence(request_)
    (event,) = seq.consume(rows(seq, logits_of(token)))
    assert (event.text, event.finish) == (text, finish)


def test_an_accepted_draft_is_a_token_for_each_row() -> None:
    seq, _ = sequence(REQUEST)
    seq.draft.tokens = [4, 5]
    events = seq.consume(rows(seq, logits_of(4, 5, 6)))
    assert seq.tokens == [1, 2, 3, 4, 5, 6] and seq.length == 5
    assert [event.tokens for event in events] == [1, 2, 3]
    assert (seq.draft.accepted, seq.draft.rejected, seq.draft.tokens) == (2, 0, [])


def test_a_wrong_draft_is_replaced_by_the_drawn_token() -> None:
    seq, _ = sequence(REQUEST)
    seq.draft.tokens = [4, 5]
    seq.consume(rows(seq, logits_of(4, 0, 6)))
    assert seq.tokens == [1, 2, 3, 4, 0] and seq.length == 4
    assert (seq.draft.accepted, seq.draft.rejected) == (1, 1)


def test_a_branch_is_followed_where_the_draft_is_wrong() -> None:
    seq, _ = sequence(REQUEST)
    seq.draft.tokens, seq.draft.branches = [4, 5], [Branch(1, [6])]
    # Rows: after 3, after 4, after 4 5, after 4 6.
    seq.consume(rows(seq, logits_of(4, 6, 0, 2)))
    assert seq.tokens == [1, 2, 3, 4, 6, 2]
    assert (seq.draft.best_path, seq.draft.branch_gain) == (1, 1)


def test_nan_ends_the_answer_with_an_error() -> None:
    seq, _ = sequence(REQUEST)
    logits = logits_of(5)
    logits[0, 0] = float("nan")
    (event,) = seq.consume(rows(seq, logits))
    assert isinstance(event.error, EngineError) and seq.tokens == [1, 2, 3]


def test_log_probabilities_are_those_before_a_bias() -> None:
    biased = Sampling(temperature=0, bias=((6, 100.0),))
    seq, _ = sequence(replace(REQUEST, sampling=biased, logprobs=1))
    (event,) = seq.consume(rows(seq, logits_of(5)))
    assert event.logprob is not None and event.logprob.token == 6
    assert event.logprob.logprob < -5 and event.alternatives[0].token == 5


def test_tokens_of_a_burst_get_their_events_later() -> None:
    seq, _ = sequence(REQUEST)
    seq.length = 2
    assert seq.steps_ahead == 4
    for token in (5, 6):
        seq.length = len(seq.tokens) - 1
        assert seq.advance(rows_of_step(token))
    seq.length = len(seq.tokens) - 1
    assert not seq.advance(rows_of_step(7)), "no step follows an end token"
    assert [(event.text, event.tokens, event.finish) for event in seq.take_events()] == [
        ("f", 1, None),
        ("g", 2, None),
        (".", 3, "stop"),
    ]


def rows_of_step(token: int) -> SequenceRows:
    return SequenceRows(StepOutput([token], lambda: logits_of(token)), 0, 1)


@pytest.mark.parametrize(
    ("request_", "steps"),
    [
        (REQUEST, 4),
        (replace(REQUEST, max_tokens=100, stop=("x",)), 4),
        (replace(REQUEST, logprobs=0), 0),
        (replace(REQUEST, sampling=Sampling(presence_penalty=1.0)), 0),
    ],
)
def test_how_far_a_sequence_goes_before_its_client_hears(request_: Request, steps: int) -> None:
    seq, _ = sequence(request_)
    seq.length = 2
    assert seq.steps_ahead == steps


def test_the_client_s_window_limits_the_answer() -> None:
    seq, events = sequence(replace(REQUEST, max_tokens=100), window=2)
    assert seq.remaining == 2 and not seq.resting
    for token in (1, 2):
        for event in seq.consume(rows(seq, logits_of(token))):
            seq.client.deliver(event)
    assert seq.remaining == 0 and seq.resting and len(events) == 2
    seq.client.ticket.read()
    assert seq.remaining == 1 and not seq.resting


def test_a_constraint_forces_tokens_without_the_model() -> None:
    matcher = Words([2, 3, 4])
    seq, _ = sequence(replace(REQUEST, max_tokens=9), matcher)
    drawn = rows(seq, logits_of(2))
    matcher.forces = True
    events = seq.consume(drawn)
    assert seq.tokens == [1, 2, 3, 2, 3, 4]
    assert [event.tokens for event in events] == [1, 2, 3] and events[-1].finish == "stop"


def test_rows_before_the_last_draw_nothing() -> None:
    seq, _ = sequence(replace(REQUEST, prompt_logprobs=True, logprobs=0))
    assert seq.sampling_params(2) == [SKIP, SKIP]
    seq.length = 1
    params = seq.sampling_params(2)
    assert params[0] == SKIP and params[1] != SKIP


def test_states_are_pooled_when_the_prompt_is_complete() -> None:
    seq, _ = sequence(replace(REQUEST, max_tokens=0, pooling="mean"))
    seq.length = 2
    assert seq.add_states(np.array([[2, 0], [0, 0]], np.float32)) is None
    seq.length = 3
    event = seq.add_states(np.array([[4, 0]], np.float32))
    assert event is not None and event.vector is not None
    assert event.vector.tolist() == [1, 0]
