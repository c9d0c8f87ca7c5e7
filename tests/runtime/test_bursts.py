"""Several steps of decoding in one call of the library: the same answers, and nobody waits for them."""

from __future__ import annotations

import random
import threading
import time
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.constraints.grammar import Constraint
from mlcbuild_runtime.devices.cpu import MOST_STEPS, Model
from mlcbuild_runtime.engine import engine as engines
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import Role
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor.batch import Onward, Step
from mlcbuild_runtime.executor.sampling_params import Sampling, Way
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .test_engine import GREEDY, ask, drain, text_of, wait_idle

WAYS = [Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=9)]
Part = tuple[list[int], int, list[int]]
"""New tokens of a sequence, its length after them, and its pages."""


class Counted(Model):
    """Notes how many steps each call made, and may take its time for each."""

    made: list[int]
    tends: list[int]
    """Of calls for sequences with constraints."""
    pause = 0.0

    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        time.sleep(self.pause)
        found = super().steps(step, ways, onward)
        self.__dict__.setdefault("made", []).append(len(found))
        return found

    def tended(self, *given: Any) -> Any:
        steps, further = super().tended(*given), None
        self.__dict__.setdefault("tends", []).append(0)
        try:
            while True:
                found = next(steps) if further is None else steps.send(further)
                self.tends[-1] += 1
                further = yield found
        finally:
            steps.close()


def greedy(prompt: list[int], count: int) -> Request:
    return Request(tuple(prompt), count, GREEDY, ignore_eos=True)


def text(engine: Engine, prompt: list[int], count: int) -> str:
    """Of the toy's answer."""
    stream = engine.tokenizer.stream()
    return "".join(map(stream.push, toy.expected(prompt, count))) + stream.finish()


def settle(model: Model) -> None:
    """As after a step just now: it is clear how many threads have room."""
    model._workers()._ended = time.perf_counter()


def begin(bundle: Path, kind: type[Model], max_pages: int | None = None, role: Role | None = None) -> Engine:
    model = kind.load(bundle, max_pages=max_pages)
    return Engine(model, Tokenizer.load(bundle, model.manifest.serving), role=role).start()


@pytest.fixture(params=["toy_bundle", "tiny_bundle", "window_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are slow beside other tests."""
    monkeypatch.setattr(engines, "TELL", 60.0)


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    running = begin(toy_bundle, Counted)
    yield running
    assert running.close()


def single(model: Model, parts: list[Part], ways: list[list[Way]]) -> list[list[int]]:
    """Tokens of steps that are made one by one."""
    found, last = list[list[int]](), [tokens for tokens, _, _ in parts]
    for number, way in enumerate(ways):
        lengths = [length + number for _, length, _ in parts]
        given = zip(last, lengths, [pages for _, _, pages in parts], strict=True)
        found.append(model.step(Step.of(list(given), prompt=False), way)[1])
        last = [[token] for token in found[-1]]
    return found


def filled(model: Model, source: random.Random, count: int) -> list[Part]:
    """Sequences that have some tokens in the cache, and one to come."""
    vocab, pages = model.manifest.vocab_size, [[1 + 4 * n, 3 + 4 * n, 2 + 4 * n] for n in range(count)]
    prompts = [[source.randrange(vocab) for _ in range(source.randrange(4, 9))] for _ in range(count)]
    model.forward(Step.of([(p, len(p), own) for p, own in zip(prompts, pages, strict=True)], prompt=True))
    return [([source.randrange(vocab)], len(p) + 1, own) for p, own in zip(prompts, pages, strict=True)]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_steps_are_what_they_are_one_by_one(bundle: Path, count: int) -> None:
    model, source = Model.load(bundle), random.Random(count)
    parts = filled(model, source, count)
    kinds = [source.choice(WAYS).way for _ in range(count)]
    ways: list[list[Way]] = [[(*kind, source.random()) for kind in kinds] for _ in range(MOST_STEPS)]

    def steps(most: int, heeds: list[bool], ends: set[int]) -> list[list[int]]:
        settle(model)
        numbers = [[way[4] for way in row] for row in ways[1:most]]
        return model.steps(Step.of(parts, prompt=False), ways[0], Onward(numbers, heeds, ends))

    expected = single(model, parts, ways)
    heeded = [True] + [False] * (count - 1)
    for most in (MOST_STEPS, 5, 1):
        assert steps(most, heeded, set()) == expected[:most]
    end = expected[2][0]
    first = next(number for number, row in enumerate(expected) if row[0] == end)
    assert steps(MOST_STEPS, heeded, {end}) == expected[: first + 1]
    assert steps(MOST_STEPS, [False] * count, {end}) == expected
    model.halt()
    assert steps(MOST_STEPS, heeded, set()) == expected[:1]
    model.halt(False)
    assert steps(MOST_STEPS, heeded, set()) == expected


def test_few_steps_while_threads_look_for_cores(toy_bundle: Path) -> None:
    model = Model.load(toy_bundle)
    step, way = Step.of([([5], 1, [1])], prompt=False), [(0.0, -np.inf, 1.0, 0.0, 0.0)]
    model._workers()._ended = time.perf_counter() - 60
    assert len(model.steps(step, way, Onward([[0.0]] * 9, [True], ()))) == 1
    assert len(model.steps(step, way, Onward([[0.0]] * 9, [True], ()))) == 10


CONSTRAINTS = [
    Constraint("regex", "([a-z]{1,9} ){2,30}", "response_format"),
    Constraint("regex", "(one|two|three)(, (one|two|three))*", "response_format"),
    Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}}', "response_format"),
    Constraint(
        "json_schema",
        '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}',
        "response_format",
    ),
]


def requests(engine: Engine, seed: int, limits: int, share: float) -> list[Request]:
    """`share`: of those with constraints."""
    source = random.Random(seed)
    found = []
    for _ in range(12):
        size = source.randrange(1, 60)
        prompt = tuple(source.randrange(256) for _ in range(size))
        stop = ("a",) if source.random() < 0.2 else ()
        sampling = replace(source.choice(WAYS), seed=source.randrange(99))
        count, on = source.randrange(1, limits - size), source.random() < 0.5
        whole = Request(prompt, count, sampling, stop, ignore_eos=on)
        if source.random() < share:
            compiled = engine.grammars.compiled(source.choice(CONSTRAINTS), message=False)
            whole = replace(whole, constraint=compiled)
        found.append(whole)
    return [*found, replace(found[0], logprobs=1, max_tokens=9)]


@pytest.mark.parametrize("max_pages", [None, 14])
@pytest.mark.parametrize(("seed", "share"), [(0, 0), (1, 0), (2, 0.5), (3, 1), (4, 1)])
def test_answers_are_what_they_are_step_by_step(
    bundle: Path, seed: int, share: float, max_pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that happens to requests: ends, stop strings, constraints, others that come and go, too few
    pages."""

    def answers(tell: float) -> list[list[tuple[str, int, str | None]]]:
        monkeypatch.setattr(engines, "TELL", tell)
        engine = begin(bundle, Counted, max_pages)
        assert isinstance(engine.model, Counted)
        engine.model.made, engine.model.tends = [0], [0]
        context = min(engine.model.limits.context_window, engine.model.pages * 16, 200)
        given = requests(engine, seed, context, share)
        found = [drain(queue) for queue in [ask(engine, request) for request in given]]
        wait_idle(engine)
        assert all(event.error is None for events in found for event in events)
        assert engine.state().free_pages == engine.state().pages
        free, constrained = max(engine.model.made) > 2, max(engine.model.tends) > 2
        assert (free or constrained) == (tell > 1)
        if share in (0, 1):  # else it depends on when they came whether some are alone with their kind
            assert (free, constrained) == (tell > 1 and share == 0, tell > 1 and share == 1)
        assert engine.close()
        return [[(event.text, event.tokens, event.finish) for event in events] for events in found]

    assert answers(60.0) == answers(1e-9)


def test_an_answer_takes_few_calls(engine: Engine) -> None:
    assert text_of(drain(ask(engine, greedy([1, 2], 100)))) == text(engine, [1, 2], 100)
    assert isinstance(engine.model, Counted)
    assert len(engine.model.made) < 20 and max(engine.model.made) == MOST_STEPS
    assert engine.state().decode_steps == 99


def test_texts_that_may_end_an_answer_are_looked_for_often(engine: Engine) -> None:
    """What comes after one is computed in vain."""
    drain(ask(engine, replace(greedy([1, 2], 100), stop=("never there",))))
    assert isinstance(engine.model, Counted) and max(engine.model.made) == 4


class Halted(Counted):
    halted = property(lambda _: True)


def test_who_comes_ends_the_steps_of_constraints_too(toy_bundle: Path) -> None:
    for kind in (Counted, Halted):
        engine = begin(toy_bundle, kind)
        compiled = engine.grammars.compiled(CONSTRAINTS[0], message=False)
        drain(ask(engine, replace(greedy([1, 2], 60), constraint=compiled)))
        assert isinstance(engine.model, Counted)
        assert (max(engine.model.tends) == 1) == (kind is Halted)
        assert engine.close()


def test_slow_steps_are_told_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(engine.model, Counted)
    monkeypatch.setattr(engines, "TELL", 1e-9)
    drain(ask(engine, greedy([1], 20)))
    assert not hasattr(engine.model, "made")


def test_who_comes_ends_the_steps_at_once(tiny_bundle: Path) -> None:
    """Somebody halts the steps of others by coming: the call that is running makes no more of them."""
    model, counts = Model.load(tiny_bundle), set[int]()
    step, way = Step.of([([5], 1, [1, 2])], prompt=False), [(0.0, -np.inf, 1.0, 0.0, 0.0)]

    def made() -> int:
        settle(model)
        return len(model.steps(step, way, Onward([[0.0]] * (MOST_STEPS - 1), [True], ())))

    took = min(timeit.repeat(made, number=1, repeat=9))  # of all steps
    for attempt in range(500):
        model.halt(False)
        thread = threading.Timer(took * (attempt % 10) / 10, model.halt)
        thread.start()
        counts.add(made())
        thread.join()
        if counts - {1, MOST_STEPS}:
            break
    assert counts - {1, MOST_STEPS}, counts


def test_news_halt_the_model(engine: Engine) -> None:
    calls: list[bool] = []
    engine.model.halt = lambda wanted=True: calls.append(wanted)  # type: ignore[method-assign]
    ticket = engine.submit(greedy([1], 30), SimpleQueue[Event]().put)
    wait_idle(engine)
    assert calls[0] is True and False in calls
    count = calls.count(True)
    ticket.cancel()
    assert calls.count(True) == count + 1
    engine.close()
    assert calls.count(True) >= count + 2


class Watched(Counted):
    """Notes who halts it, and the order of its calls."""

    def halt(self, wanted: bool = True) -> None:
        self.__dict__.setdefault("by", set()).add(threading.current_thread().name if wanted else "")
        super().halt(wanted)

    def step(self, step: Step, ways: Sequence[Way], masks: Any = ()) -> Any:
        self.__dict__.setdefault("calls", []).append("p" if step.prompt else 1)
        return super().step(step, ways, masks)

    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        found = super().steps(step, ways, onward)
        self.__dict__.setdefault("calls", []).append(len(found))
        return found


def test_who_waits_for_a_turn_halts_the_model_that_has_it(toy_bundle: Path) -> None:
    role = Role()
    engine = begin(toy_bundle, Watched, role=role)
    assert isinstance(engine.model, Watched)
    engine.model.pause = 0.02

    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.001):
            with role.turns:
                pass

    other = threading.Thread(target=wait, name="other")
    other.start()
    for _ in range(50):  # on a busy machine the other may come in vain
        assert text_of(drain(ask(engine, greedy([1], 120)))) == text(engine, [1], 120)
        if "other" in engine.model.__dict__["by"]:
            break
    over.set()
    other.join(30)
    assert "other" in engine.model.__dict__["by"]
    assert engine.close()


def test_prompts_are_not_kept_waiting(toy_bundle: Path) -> None:
    """While there is a prompt to compute, there is one step of decoding between two chunks of it."""
    engine = begin(toy_bundle, Watched)
    first = ask(engine, greedy([1], 200))
    first.get(timeout=30)
    calls = engine.model.__dict__["calls"]
    before = len(calls)
    drain(ask(engine, greedy([2] * 200, 5)))
    drain(first)
    own = calls[before:]
    prompts = [place for place, call in enumerate(own) if call == "p"]
    assert len(prompts) >= 6, "chunks of 32 tokens"
    assert set(own[prompts[0] : prompts[-1]]) <= {"p", 1}
    assert max(call for call in calls if call != "p") > 2
    assert engine.close()


class Broken(Model):
    """Fails after some calls, or computes what is no number."""

    left, wrong = 2, False

    def steps(self, step: Step, ways: Sequence[Way], onward: Onward) -> list[list[int]]:
        self.left -= 1
        if self.left < 0 and not self.wrong:
            raise RuntimeError("a kernel has failed")
        found = super().steps(step, ways, onward)
        return [*found[:2], [-1] * len(step.lengths)] if self.left < 0 else found


@pytest.mark.parametrize("wrong", [False, True])
def test_a_failure_ends_its_requests_and_no_others(toy_bundle: Path, wrong: bool) -> None:
    engine = begin(toy_bundle, Broken)
    assert isinstance(engine.model, Broken)
    engine.model.wrong = wrong
    try:
        queues = [ask(engine, greedy([n], 120)) for n in range(3)]
        found = [drain(queue)[-1] for queue in queues]
        words = "the model's logits are not numbers" if wrong else "the model has failed: a kernel has failed"
        assert any(isinstance(event.error, EngineError) and str(event.error) == words for event in found)
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
        engine.model.left = 1000
        assert text_of(drain(ask(engine, greedy([7, 8], 60)))) == text(engine, [7, 8], 60)
    finally:
        assert engine.close()


def test_a_client_that_does_not_read_is_told_no_more_than_it_has_room_for(engine: Engine) -> None:
    queue = SimpleQueue[Event]()
    ticket = engine.submit(greedy([1], 100), queue.put, window=5)
    end = time.monotonic() + 20
    while queue.qsize() < 5 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert queue.qsize() == 5
    for _ in range(100):
        queue.get(timeout=20)
        ticket.read()
