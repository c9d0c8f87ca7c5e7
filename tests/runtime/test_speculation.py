"""Tests of speculative decoding: answers are the same as without it, whatever tokens are drafted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.devices.cpu import EXACT_ROWS
from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.executor import executor, loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.sampling_params import Sampling
from mlcbuild_runtime.text.tokenizer import Tokenizer

from tests.runtime.draft_engines import TEXT, Guess, loaded, plain, start

from . import toy
from .grammars import allowed_by
from .test_engine import GREEDY, ask, drain, greedy, held, tokens_of, wait_idle
from .test_sampling import chi_squared

__all__ = ["plain"]  # a fixture


def perfect(sequence: Sequence, count: int) -> list[int]:
    return toy.expected(sequence.tokens, count)


def garbage(sequence: Sequence, count: int) -> list[int]:
    return [random.Random(len(sequence.tokens) + i).randrange(256) for i in range(count)]


def partly(sequence: Sequence, count: int) -> list[int]:
    """Returns a random draft of at most `count` tokens: correct ones, of which one is often replaced by a
    wrong one, or no tokens."""
    source = random.Random(sum(sequence.tokens))
    actual = toy.expected(sequence.tokens, source.randrange(count + 1))
    if actual and source.random() < 0.6:
        actual[source.randrange(len(actual))] ^= 1
    return actual


GUESSES = [perfect, garbage, partly]


@pytest.fixture(scope="module", params=GUESSES)
def drafting(request: pytest.FixtureRequest, toy_bundle: Path) -> Iterator[Engine]:
    engine = start(toy_bundle, request.param)
    yield engine
    assert engine.close()


def jobs(seed: int, count: int) -> list[tuple[list[int], int]]:
    source = random.Random(seed)
    return [
        ([source.randrange(256) for _ in range(source.randrange(1, 80))], source.randrange(1, 90))
        for _ in range(count)
    ]


def test_greedy_answers_alone_and_together(drafting: Engine) -> None:
    for prompt, count in jobs(1, 6):
        events = drain(ask(drafting, greedy(prompt, count)))
        assert tokens_of(events) == toy.expected(prompt, count)
        assert [event.tokens for event in events] == list(range(1, count + 1))
        assert events[-1].finish == "length"
    many = jobs(2, 20)
    queues = [ask(drafting, greedy(*job)) for job in many]
    for (prompt, count), queue in zip(many, queues, strict=True):
        assert tokens_of(drain(queue)) == toy.expected(prompt, count)
    wait_idle(drafting)
    state = drafting.state()
    assert state.free_pages == state.pages
    assert state.drafted_tokens > 100


def test_perfect_drafts_are_accepted_and_save_steps(toy_bundle: Path) -> None:
    engine = start(toy_bundle, perfect)
    try:
        events = drain(ask(engine, greedy([3, 5, 7], 100)))
        assert tokens_of(events) == toy.expected([3, 5, 7], 100)
        assert (events[-1].accepted, events[-1].rejected) == (86, 0)  # 1 + 12 steps of 1 + 7, and 1 + 2
        state = engine.state()
        assert (state.drafted_tokens, state.accepted_tokens, state.answer_tokens) == (86, 86, 100)
        off = drain(ask(engine, Request((3, 5, 7), 20, GREEDY, speculate=False)))
        assert (off[-1].accepted, off[-1].rejected, off[-1].tokens) == (0, 0, 20)
    finally:
        engine.close()


def test_garbage_is_counted_as_rejected(toy_bundle: Path) -> None:
    engine = start(toy_bundle, garbage)
    try:
        last = drain(ask(engine, greedy([1, 2], 50)))[-1]
        assert last.rejected > 200
        assert last.accepted < 20
    finally:
        engine.close()


SAMPLINGS = [
    Sampling(temperature=1.5, seed=3),
    Sampling(temperature=1.2, top_p=0.8, top_k=30, min_p=0.01, seed=4),
    Sampling(temperature=0, frequency_penalty=0.7, presence_penalty=0.3),
    Sampling(temperature=1.3, repetition_penalty=1.4, bias=((5, 4.0), (9, -100.0)), seed=6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_and_logprobs_with_and_without(
    plain: Engine, drafting: Engine, sampling: Sampling
) -> None:
    """Checks that requests with a seed get identical tokens and log-probabilities with and without drafts,
    alone and in a batch."""

    def request(prompt: list[int], count: int) -> Request:
        return Request(tuple(prompt), count, sampling, logprobs=3)

    many = jobs(3, 6)
    queues = [ask(plain, request(*job)) for job in many]
    expected = [drain(queue) for queue in queues]
    alone = [drain(ask(drafting, request(*job))) for job in many[:3]]
    queues = [ask(drafting, request(*job)) for job in many]
    together = [drain(queue) for queue in queues]
    for actual, events in zip([*alone, *together], [*expected[:3], *expected], strict=True):
        assert tokens_of(actual) == tokens_of(events)
        assert [(e.logprob, e.alternatives) for e in actual] == [(e.logprob, e.alternatives) for e in events]
        assert "".join(e.text for e in actual) == "".join(e.text for e in events)


@pytest.mark.parametrize("guess", GUESSES)
def test_answers_when_pages_run_out(toy_bundle: Path, guess: Guess) -> None:
    engine = start(toy_bundle, guess, pages=18)
    try:
        # Where prompts are slow, on GPUs or on a busy machine, short answers would end before others begin.
        many = [(prompt[:70], count + 80) for prompt, count in jobs(5, 12)]
        with held(engine):
            queues = [ask(engine, greedy(*job)) for job in many]
        for (prompt, count), queue in zip(many, queues, strict=True):
            assert tokens_of(drain(queue)) == toy.expected(prompt, count)
        wait_idle(engine)
        assert engine.state().free_pages == 18
        assert engine.state().preemptions > 0
    finally:
        engine.close()


@pytest.mark.parametrize("guess", GUESSES)
def test_stop_strings_and_end_tokens_inside_a_draft(toy_bundle: Path, plain: Engine, guess: Guess) -> None:
    engine, without = start(toy_bundle, guess, eos=True), start(toy_bundle, None, eos=True)
    try:
        for prompt in ([seed, 2, seed] for seed in range(6)):
            text = "".join(e.text for e in drain(ask(plain, greedy(prompt, 60))))
            for request in (
                Request(tuple(prompt), 200, GREEDY),
                Request(tuple(prompt), 60, GREEDY, stop=(text[20:23],), ignore_eos=True),
            ):
                actual, expected = drain(ask(engine, request)), drain(ask(without, request))
                assert [(e.text, e.finish, e.tokens) for e in actual] == [
                    (e.text, e.finish, e.tokens) for e in expected
                ]
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
    finally:
        engine.close()
        without.close()


def test_a_slow_reader_gets_no_more_than_its_window(toy_bundle: Path) -> None:
    engine = start(toy_bundle, perfect)
    try:
        slow: SimpleQueue[Event] = SimpleQueue()
        ticket = engine.submit(greedy([1], 60), slow.put, window=5)
        most, events = 0, list[Event]()
        while not events or not events[-1].last:
            events.append(slow.get(timeout=120))
            most = max(most, slow.qsize() + 1)
            ticket.read()
        assert tokens_of(events) == toy.expected([1], 60)
        assert most <= 5
    finally:
        engine.close()


def test_cancelling_leaves_no_trace(drafting: Engine) -> None:
    queue: SimpleQueue[Event] = SimpleQueue()
    tickets = [drafting.submit(greedy([i], 255), queue.put) for i in range(8)]
    queue.get(timeout=120)
    for ticket in tickets:
        ticket.cancel()
    wait_idle(drafting)
    assert drafting.state().free_pages == drafting.state().pages


@pytest.mark.parametrize("guess", GUESSES)
def test_constrained_answers(toy_bundle: Path, guess: Guess) -> None:
    """Checks answers with constraints: each position of a draft uses its own mask, and the matcher never
    receives a token that was not sampled."""
    constraint = Constraint("regex", "[a-f]{3}(-[0-9]+){2}[xyz]{5,40}", "response_format")
    engine, without = start(toy_bundle, guess, eos=True), start(toy_bundle, None, eos=True)
    try:
        compiled = engine.grammars.compiled(constraint, message=False)
        for seed in range(6):
            request = Request((1, 2, seed), 60, Sampling(1.0, seed=seed), constraint=compiled, logprobs=0)
            actual, expected = drain(ask(engine, request)), drain(ask(without, request))
            assert tokens_of(actual) == tokens_of(expected)
            assert actual[-1].finish == expected[-1].finish
    finally:
        engine.close()
        without.close()


def test_what_is_forced_fits_and_matchers_that_have_failed_force_nothing(tiny_bundle: Path) -> None:
    """Checks forced tokens with a tokenizer that puts a space in front of a text: no forced text may begin
    with this space. A failed matcher forces nothing."""
    tokenizer = Tokenizer.load(tiny_bundle, loaded(tiny_bundle).manifest.serving)
    grammars = Grammars(tokenizer.vocabulary, 432, tokenizer.eos)
    matcher = grammars.compiled(Constraint("regex", "the end of all(xyz|abc)", "x"), message=False).matcher()
    while not matcher.finished:
        forced = matcher.forced(3)
        assert len(forced) <= 3 and matcher.accepted(forced) == len(forced)
        matcher.after(forced)
        matcher.take(forced[0] if forced else int(allowed_by(matcher).nonzero()[0][0]))
    failed = grammars.compiled(Constraint("regex", "abc", "x"), message=False).matcher()
    with pytest.raises(RequestError, match="the constraint cannot be followed"):
        failed.take(next(iter(set(range(432)) - set(allowed_by(failed).nonzero()[0].tolist()))))
    assert failed.forced(3) == [] and failed.accepted([5]) == 0


@pytest.mark.parametrize("guess", [perfect, partly])
def test_the_distribution_is_the_models(toy_bundle: Path, guess: Guess) -> None:
    """Checks that speculative decoding does not change the distribution of answers: 1500 sampled answers of
    three tokens are compared, by a chi-squared test, with the exact probability of each answer."""
    model = loading.load(toy_bundle)
    prompt, total, temperature = [7, 8, 9], 1500, 2.0

    def exact(tokens: list[int], left: int) -> dict[tuple[int, ...], float]:
        if not left:
            return {(): 1.0}
        row = executor.score(model, tokens)[-1].astype(np.float64)
        best = np.argsort(-row)[:4]
        weights = np.exp((row[best] - row[best[0]]) / temperature)
        by_name = {}
        for token, p in zip(best.tolist(), weights / weights.sum(), strict=True):
            for rest, more in exact([*tokens, token], left - 1).items():
                by_name[token, *rest] = p * more
        return by_name

    expected = exact(prompt, 3)
    engine = start(toy_bundle, guess, max_waiting=total)
    try:
        samplings = [Sampling(temperature, top_k=4, seed=seed) for seed in range(total)]
        queues = [ask(engine, Request(tuple(prompt), 3, sampling, logprobs=0)) for sampling in samplings]
        counts = Counter(tuple(tokens_of(drain(queue))) for queue in queues)
        state = engine.state()
        assert state.accepted_tokens > 150
        assert state.drafted_tokens - state.accepted_tokens > 150
        assert set(counts) <= set(expected)
        assert chi_squared(counts, expected, total) < 5
    finally:
        engine.close()


@pytest.mark.parametrize("rows", range(2, EXACT_ROWS + 1))
def test_checking_is_as_decoding_bit_by_bit(tiny_bundle: Path, rows: int) -> None:
    model = loaded(tiny_bundle)
    tokens = [1, *range(30, 30 + 60)]
    pages = list(range(4))
    decoded = executor.score(model, tokens, chunk=1)[60 - rows : 60].copy()
    draft = (tokens[60 - rows : 60], 60, pages)
    checked = executor.forward(model, ModelStep.of([draft], [rows], prompt=False))
    assert (decoded == checked).all()
    # Beside others, too.
    other = ([5, 6, 7][: max(1, EXACT_ROWS - rows)], 3, [9])
    both = ModelStep.of([other, draft], [len(other[0]), rows], prompt=False)
    checked = executor.forward(model, both)
    if rows + len(other[0]) <= EXACT_ROWS:
        assert (decoded == checked[len(other[0]) :]).all()


@pytest.mark.parametrize("how", ["lookup", "draft", "smaller", "predicted"])
def test_a_real_model_says_the_same(request: pytest.FixtureRequest, tiny_bundle: Path, how: str) -> None:
    """Checks that speculative decoding gives a compiled model the same answers as decoding without drafts.
    Where the model drafts for itself, nearly all draft tokens are accepted."""
    tokenizer = Tokenizer.load(tiny_bundle, loaded(tiny_bundle).manifest.serving)
    prompt = tuple(tokenizer.encode(TEXT))
    fields = '{"name": {"type": "string"}, "age": {"type": "integer"}}'
    source = f'{{"type": "object", "properties": {fields}, "required": ["name", "age"]}}'
    grammars = Grammars(tokenizer.vocabulary, 432, tokenizer.eos)
    schema = grammars.compiled(Constraint("json_schema", source, "response_format"), message=False)
    requests = [
        Request(prompt, 60, GREEDY, logprobs=0, ignore_eos=True),
        Request(prompt, 60, Sampling(0.8, seed=1, frequency_penalty=0.3), logprobs=0, ignore_eos=True),
        Request(prompt[:20], 40, Sampling(1.0, seed=2), logprobs=0, constraint=schema),
    ]
    drafts = {"draft": tiny_bundle, "smaller": None, "lookup": None, "predicted": None}
    if how == "smaller":
        drafts[how] = request.getfixturevalue("small_bundle")
    # Where the model drafts for itself, its drafts are right, so that no branch is accepted.
    speculate = None if how == "predicted" else Speculate(drafts[how], branches=how != "draft")
    answers = []
    for engine in (
        start(tiny_bundle, None, eos=True),
        start(tiny_bundle, None, eos=True, speculate=speculate),
    ):
        queues = [ask(engine, each) for each in [*requests, *requests]]
        answers.append([drain(queue) for queue in queues])
        state = engine.state()
        engine.close()
        if how == "predicted":  # the answers, a little changed
            entries = [tokens_of(events) for events in answers[0]]
            edited = [(*tokens[:9], 40, 41, *tokens[9:20], *tokens[21:]) for tokens in entries]
            requests = [
                replace(each, prediction=actual) for each, actual in zip(requests, edited, strict=False)
            ]
    assert [tokens_of(events) for events in answers[0]] == [tokens_of(events) for events in answers[1]]
    assert state.drafted_tokens >= state.accepted_tokens > 0
    if how == "draft":
        assert state.accepted_tokens > 0.9 * state.drafted_tokens > 10
    if how == "smaller":
        assert state.accepted_tokens < state.drafted_tokens
    if how == "predicted":
        counts = [(events[-1].tokens, events[-1].accepted, events[-1].rejected) for events in answers[1]]
        assert sum(accepted for _, accepted, _ in counts) > 20, counts
