"""Tests of draft trees, drafts with branches for speculative decoding: each row of logits has the same bits
as decoding along its path, and answers stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.devices.cpu import EXACT_ROWS
from mlcbuild_runtime.engine import draft_tree
from mlcbuild_runtime.engine.draft_tree import Branch
from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.request import Request, Ticket
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.speculation import Speculation
from mlcbuild_runtime.executor import executor, loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import Sampling

from . import toy
from .draft_engines import TEXT, plain, start
from .test_engine import GREEDY, ask, drain, greedy, held, tokens_of, wait_idle
from .test_speculation import SAMPLINGS, jobs
from .wrapped import Stepwise

__all__ = ["plain"]  # a fixture

PAGE = 16


def grown(source: random.Random, rows: int, size: int = 256) -> tuple[list[int], list[Branch]]:
    """Returns a random draft tree of at most `rows` rows: (tokens of the draft, its branches, some of which
    leave other branches). size: number of different tokens."""

    def tokens(most: int) -> list[int]:
        return [source.randrange(size) for _ in range(source.randrange(1, most + 1))]

    draft, branches = tokens(max(1, rows - 1)), list[Branch]()
    left = rows - len(draft)
    while left > 0 and source.random() < 0.8:
        parent = source.randrange(len(branches) + 1)
        first = branches[parent - 1].start + 1 if parent else 0
        begin = source.randrange(first, len(draft_tree.path_tokens(draft, branches, parent)) + 1)
        branches.append(Branch(begin, tokens(min(left, 4)), parent))
        left -= len(branches[-1].tokens)
    return draft, branches


def decoded(model: Executor, tokens: list[int], pages: list[int]) -> None:
    """Computes the tokens of a sequence one by one, as decoding does, so that their keys and values are in
    the given pages of the model's KV cache."""
    for end in range(1, len(tokens) + 1):
        executor.forward(model, ModelStep.of([(tokens[end - 1 : end], end, pages[: -(-end // PAGE)])]))


@pytest.mark.parametrize(("bundle", "shortest"), [("toy", 19), ("tiny", 19), ("window", 33)])
def test_every_row_is_as_decoding_its_path(
    request: pytest.FixtureRequest, bundle: str, shortest: int
) -> None:
    """Checks that the logits of each token in a draft tree have the same bits as if its path were decoded
    token by token. Branches leave the draft or other branches at every position of a page, with two sequences
    in a step."""
    model = loading.load(request.getfixturevalue(f"{bundle}_bundle"), pages=64)
    source, size = random.Random(3), model.manifest.vocab_size
    for length in (shortest, shortest + 9):
        parts, expected, paths = list[draft_tree.Part](), list[int](), list[list[int]]()
        forks, free = list[draft_tree.Fork](), source.sample(range(40, 64), 24)
        for text in ([source.randrange(size) for _ in range(length - less)] for less in (0, 17)):
            draft, branches = grown(source, EXACT_ROWS // 2 - 1, size)
            draft_pages = [free.pop() for _ in range(-(-(len(text) + len(draft)) // PAGE))]
            decoded(model, text[:-1], draft_pages)
            for branch in branches:
                begin = len(text) + branch.start
                branch.shared = begin // PAGE
                needed = -(-(begin + len(branch.tokens)) // PAGE) - branch.shared
                branch.pages = [free.pop() for _ in range(needed)]
            more, actual = draft_tree.parts(len(text), draft_pages, branches, PAGE)
            parts += [([text[-1], *draft], len(text) + len(draft), draft_pages), *more]
            expected += [1 + len(draft), *[len(branch.tokens) for branch in branches]]
            forks += actual
            for index, depth in draft_tree.rows(draft, branches):
                paths.append(text + draft_tree.path_tokens(draft, branches, index)[:depth])
        logits = executor.forward(
            model, ModelStep.of(parts, expected, prompt=False)._replace(forks=forks)
        ).copy()
        assert len(logits) == len(paths)
        for leaf in [p for p in paths if not any(len(o) > len(p) and o[: len(p)] == p for o in paths)]:
            alone = executor.score(model, leaf, chunk=1)
            for row, path in zip(logits, paths, strict=True):
                assert path != leaf[: len(path)] or (row == alone[len(path) - 1]).all()


class Growing(Speculation):
    """Speculative decoding with random draft trees. Some of their paths begin with correct tokens, and trees
    are as large as a step allows."""

    def __init__(self, parts: int) -> None:
        super().__init__(7, EXACT_ROWS, parts=parts)
        self._prices.best = lambda batch, most: most  # type: ignore[method-assign]
        self.gained = 0

    def allot(self, sequences: Any, rows: int) -> list[tuple[Sequence, int]]:
        for sequence in sequences:
            sequence.draft.credit.balance, sequence.draft.credit.length = 5.0, 7
        return super().allot(sequences, rows)

    def propose(self, parts: Any) -> None:
        for sequence, count in parts:
            source = random.Random(sum(sequence.tokens))
            draft = sequence.draft
            draft.tokens, draft.branches = grown(source, count)
            right = toy.expected(sequence.tokens, count)
            paths = [(0, draft.tokens), *((branch.start, branch.tokens) for branch in draft.branches)]
            for begin, tokens in paths:
                if source.random() < 0.7:
                    end = source.randrange(len(tokens) + 1)
                    tokens[:end] = right[begin : begin + end]

    def spread(self, sequences: Any, rows: int, batch: int) -> None:
        for sequence in sequences:
            draft, kept = sequence.draft, 0
            draft.tokens = sequence.allowed(draft.tokens)
            for branch in draft.branches:
                before = draft_tree.path_tokens(draft.tokens, draft.branches, branch.parent)[: branch.start]
                path = before + branch.tokens
                if batch == self._parts or len(before) < branch.start or sequence.allowed(path) != path:
                    break
                kept, batch = kept + 1, batch + 1
            del draft.branches[kept:]

    def settle(self, rows: int, drafts: Any, seconds: float) -> None:
        super().settle(rows, drafts, seconds)
        self.gained += sum(draft.gained for draft in drafts)


def grow(bundle: Path, **options: Any) -> tuple[Engine, Growing]:
    engine = start(bundle, None, **options)
    engine._runner.speculation = speculation = Growing(engine.manifest.limits.max_batch)
    return engine, speculation


@pytest.fixture(scope="module")
def growing(toy_bundle: Path) -> Iterator[Engine]:
    engine, _ = grow(toy_bundle)
    yield engine
    assert engine.close()


def test_greedy_answers_alone_and_together(growing: Engine) -> None:
    many = jobs(1, 24)
    for prompt, count in many[:8]:
        last = (events := drain(ask(growing, greedy(prompt, count))))[-1]
        assert tokens_of(events) == toy.expected(prompt, count)
        assert [event.tokens for event in events] == list(range(1, count + 1))
        assert last.accepted < count
    queues = [ask(growing, greedy(*job)) for job in many]
    for (prompt, count), queue in zip(many, queues, strict=True):
        assert tokens_of(drain(queue)) == toy.expected(prompt, count)
    wait_idle(growing)
    state = growing.state()
    assert state.free_pages == state.pages
    assert state.drafted_tokens > state.accepted_tokens > 100
    speculation = growing._runner.speculation
    assert isinstance(speculation, Growing) and speculation.gained > 20


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_and_logprobs(plain: Engine, growing: Engine, sampling: Sampling) -> None:
    requests = [Request(tuple(prompt), count, sampling, logprobs=3) for prompt, count in jobs(3, 6)]
    expected = [drain(ask(plain, request)) for request in requests]
    results = [drain(queue) for queue in [ask(growing, request) for request in requests]]
    assert [[(e.text, e.logprob, e.alternatives) for e in events] for events in results] == [
        [(e.text, e.logprob, e.alternatives) for e in events] for events in expected
    ]


@pytest.mark.parametrize("pages", [16, 21])
def test_answers_when_pages_run_out(toy_bundle: Path, pages: int) -> None:
    engine, speculation = grow(toy_bundle, pages=pages)
    try:
        many = [(prompt[:70], count) for prompt, count in jobs(5, 12)]
        with held(engine):
            queues = [ask(engine, greedy(*job)) for job in many]
        for (prompt, count), queue in zip(many, queues, strict=True):
            assert tokens_of(drain(queue)) == toy.expected(prompt, count)
        wait_idle(engine)
        assert engine.state().free_pages == pages
        assert engine.state().preemptions > 0 and speculation.gained > 5
    finally:
        engine.close()


def test_constraints_ends_and_stop_texts(toy_bundle: Path) -> None:
    constraint = Constraint("regex", "[a-f]{3}(-[0-9]+){2}[xyz]{5,40}", "response_format")
    (engine, _), without = grow(toy_bundle, eos=True), start(toy_bundle, None, eos=True)
    try:
        compiled = engine.grammars.compiled(constraint, message=False)
        for seed in range(6):
            prompt = (seed, 2, seed)
            text = "".join(e.text for e in drain(ask(without, Request(prompt, 60, GREEDY, ignore_eos=True))))
            for request in (
                Request(prompt, 60, Sampling(1.0, seed=seed), constraint=compiled, logprobs=0),
                Request(prompt, 200, GREEDY),
                Request(prompt, 60, GREEDY, stop=(text[20:23],), ignore_eos=True),
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


class Failing(Stepwise):
    def step(self, step: ModelStep, params: Any, masks: Any = ()) -> Any:
        if step.forks:
            raise RuntimeError("no")
        return self.inner.step(step, params, masks)


def test_a_failing_step_gives_all_pages_back(toy_bundle: Path) -> None:
    engine, _ = grow(toy_bundle)
    engine._runner.executor = cast(Executor, Failing(engine.executor))
    try:
        last = [drain(ask(engine, greedy([seed, 3], 90)))[-1] for seed in range(4)]
        assert any(event.error is not None for event in last)
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "draft"), [("tiny", None), ("window", None), ("tiny", "small")])
def test_a_real_model_with_branches_says_the_same(
    request: pytest.FixtureRequest, name: str, draft: str | None
) -> None:
    """Checks that branches in drafts do not change the answers of a compiled model, greedy or sampled, alone
    or in a batch. The scheduler is made to count branches as free, so that as many as possible are
    drafted."""
    bundle, small = (request.getfixturevalue(f"{each}_bundle") for each in (name, draft or name))
    settings = None, Speculate(small if draft else None)
    without, engine = (start(bundle, None, eos=True, speculate=how) for how in settings)
    speculation, gained = engine._runner.speculation, [0]
    prices = speculation._prices  # not this machine's, so that there are always the same drafts
    prices.share = lambda *_: 0.0  # type: ignore[method-assign]
    prices.price = lambda *_: 0.0  # type: ignore[method-assign]
    prices.best = lambda batch, most: most  # type: ignore[method-assign]
    settle = speculation.settle

    def counting(rows: int, outcomes: Any, seconds: float) -> None:
        settle(rows, outcomes, seconds)
        gained[0] += sum(outcome.gained for outcome in outcomes)

    speculation.settle = counting  # type: ignore[method-assign]
    prompt = tuple(without.tokenizer.encode(TEXT))
    requests = [
        Request(prompt[skip:], 60, sampling, logprobs=0, ignore_eos=True)
        for skip in (0, 3, 5, 7)
        for sampling in (GREEDY, Sampling(0.5, seed=skip))
    ]
    try:
        answers = []
        for each in (without, engine):
            alone = [drain(ask(each, request)) for request in requests[:2]]
            together = [drain(queue) for queue in [ask(each, request) for request in requests[2:]]]
            # Which prompts share a step depends on the moments at which they arrive.
            answers.append(([[e.logprob for e in events] for events in alone], [*map(tokens_of, together)]))
        assert answers[0] == answers[1]
        assert gained[0] > 5
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
    finally:
        engine.close()
        without.close()


def test_the_path_that_was_taken_keeps_its_pages(toy_bundle: Path, plain: Engine) -> None:
    """Checks which pages remain after a branch was accepted. The draft model has computed the draft but no
    branch, so it continues from the last page that the branch shares with the draft."""
    schedule = Schedule(Pages(6), PAGE, 4)
    request, silent = greedy(list(range(40)), 60), Ticket(lambda: None, None)
    sequence = Sequence(request, lambda _: None, silent, plain.tokenizer, plain.executor.sample)
    schedule.add(sequence)
    schedule.admit()
    draft = sequence.draft
    sequence.length, draft.tokens, draft.cached = 39, [1, 2, 3, 4], 44
    assert schedule.stretch(sequence, 4) == 4
    draft.branches = [Branch(2, [7, 8]), Branch(3, [9], parent=1), Branch(1, [5]), Branch(0, [6])]
    trunk = list(sequence.pages)
    schedule.branch(sequence)
    first, second, third = draft.branches  # there was no page for the last
    assert [branch.shared for branch in draft.branches] == [2, 2, 2]
    _, forks = draft_tree.parts(40, sequence.pages, draft.branches, PAGE)
    assert forks == [
        (trunk[2], first.pages[0], 10),
        (first.pages[0], second.pages[0], 11),
        (trunk[2], third.pages[0], 9),
    ]
    draft.best_path = 2
    schedule.prune(sequence)
    assert sequence.pages == [*trunk[:2], *second.pages]
    assert draft.cached == 32
    assert schedule.pages.available == 3
    schedule.remove(sequence)
    assert schedule.pages.available == 6
