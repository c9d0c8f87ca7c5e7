"""Tests that cheap constraints overtake expensive ones, however busy the machine is."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.constraints.stages import SHORT, STAGES, Stage, Trials, looks_costly
from mlcbuild_runtime.constraints.trial import TooCostlyError, Trial, TrialOutcome
from mlcbuild_runtime.openai.response_format import schema_constraint
from mlcbuild_runtime.text.turns import CrowdedError, client

from .grammars import GRAMMARS, SIZE, TOKENIZERS

LONG = 60.0


class Costs:
    """A replacement for trials of constraints: a grammar is the text of a number, the CPU seconds that its
    trial claims to take. No time is spent."""

    def __init__(self) -> None:
        self.held = threading.Event()
        """Event that holds back simulated compilations of constraints: those in the last stage, which has the
        longest time limit, wait until a test sets it."""
        self.ran: list[tuple[str, float]] = []
        """Each simulated trial of a constraint, in order, as (the constraint's grammar, the CPU seconds that
        the trial may use)."""

    def run(self, trial: Trial, grammar: str) -> TrialOutcome:
        self.ran.append((grammar, trial._seconds))
        if trial._seconds == STAGES[-1].seconds:
            assert self.held.wait(LONG)
        if grammar == "wrong":
            return TrialOutcome("it is wrong", 0)
        if float(grammar) > trial._seconds:
            raise TooCostlyError
        return TrialOutcome("", int(1000 * float(grammar)))


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    costs = Costs()

    def run(trial: Trial, grammar: str) -> TrialOutcome:
        return costs.run(trial, grammar)

    monkeypatch.setattr(Trial, "run", run)
    yield costs
    costs.held.set()


@pytest.fixture
def trials(costs: Costs) -> Trials[int]:
    patient = tuple(replace(stage, patience=LONG, compile_niceness=0) for stage in STAGES)
    return Trials(GRAMMARS["json"]._tokens, patient)


def passed(trials: Trials[int], grammar: str) -> int | str:
    return trials.passed(grammar, grammar, lambda outcome: outcome.bytes)


def test_each_constraint_goes_through_the_stages_that_it_needs(costs: Costs, trials: Trials[int]) -> None:
    costs.held.set()
    limits = [stage.seconds for stage in STAGES]
    assert limits == [0.03, 0.1, 2.0]
    for grammar, result, count in (
        ("0.01", 10, 1),
        ("0.05", 50, 2),
        ("1.5", 1500, 3),
        ("3.5", "it takes more than 2 s or 128 MiB to compile and begin: simplify it", 3),
        ("wrong", "it is wrong", 1),
    ):
        del costs.ran[:]
        assert passed(trials, grammar) == result
        assert costs.ran == [(grammar, limit) for limit in limits[:count]]
        assert passed(trials, grammar) == result  # without a further trial
        assert len(costs.ran) == count
    trials.forget("0.05")
    passed(trials, "0.05")
    assert costs.ran[-1] == ("0.05", 0.1)


def test_cheap_constraints_pass_those_that_wait(costs: Costs, trials: Trials[int]) -> None:
    """Checks that no cheap constraint waits for any of forty constraints that take two seconds or more."""
    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(passed, trials, f"{3 + number}") for number in range(40)]
        last = trials.tries[-1].turns
        end = time.monotonic() + LONG
        while last.waiting < 39:
            assert time.monotonic() < end
            time.sleep(0.002)
        del costs.ran[:]
        assert [passed(trials, f"0.0{count}1") for count in range(1, 10)] == list(range(11, 92, 10))
        assert not any(each.done() for each in asked)
        assert {limit for _, limit in costs.ran} == {0.03, 0.1}
        costs.held.set()
        assert all("simplify it" in str(each.result()) for each in asked)


def test_what_looks_costly_is_tried_later(costs: Costs, trials: Trials[int]) -> None:
    """Checks that a constraint without large numbers overtakes earlier ones of the same client with some."""
    first = trials.tries[0].turns
    with ThreadPoolExecutor(4) as pool:
        with first.turn():
            waiting = []
            for count, grammar in enumerate(("100e-4", "101e-4", "0.02", "0.01")):
                waiting.append(pool.submit(passed, trials, grammar))
                end = time.monotonic() + LONG
                while first.waiting < count + 1:
                    assert time.monotonic() < end
                    time.sleep(0.002)
        assert [each.result() for each in waiting] == [10, 10, 20, 10]
    assert [grammar for grammar, _ in costs.ran] == ["0.02", "0.01", "100e-4", "101e-4"]


@pytest.mark.parametrize(
    ("grammar", "costly"),
    [
        ('start: %json {"type": "array", "maxItems": 900}', True),
        ("start: /(a{1000})/", True),
        ("start: /x{2,99}/", False),
        ('start: %json {"properties": {"field100": {"enum": ["yes", "no", 12]}}}', False),
        ("x" * (SHORT + 1), True),
    ],
)
def test_large_numbers_and_long_texts_look_costly(grammar: str, costly: bool) -> None:
    assert looks_costly(grammar) is costly


def test_a_client_with_many_constraints_does_not_delay_another(costs: Costs, trials: Trials[int]) -> None:
    """Checks that a client's expensive constraint does not wait until all ten of another client's are
    compiled on trial: in the last stage, clients (by address) take turns."""

    def ask(address: str, grammar: str) -> int | str:
        client.set(address)
        return passed(trials, grammar)

    last = trials.tries[-1].turns
    with ThreadPoolExecutor(12) as pool:
        for number in range(11):
            pool.submit(ask, "many" if number < 10 else "one", "1.5" if number == 10 else f"1.1{number}")
            end = time.monotonic() + LONG
            while last.waiting < number:
                assert time.monotonic() < end
                time.sleep(0.002)
        costs.held.set()
    order = [grammar for grammar, limit in costs.ran if limit == STAGES[-1].seconds]
    assert order.index("1.5") <= 2 and len(order) == 11


def test_only_so_many_wait_for_a_stage(costs: Costs) -> None:
    few = (STAGES[0], Stage(2.0, places=3, patience=LONG))
    trials: Trials[int] = Trials(GRAMMARS["json"]._tokens, few)
    with ThreadPoolExecutor(8) as pool:
        waiting = []
        for number in range(4):
            waiting.append(pool.submit(passed, trials, f"1.{number}"))
            end = time.monotonic() + LONG
            while trials.tries[1].turns.waiting < number:
                assert time.monotonic() < end
                time.sleep(0.002)
        while len(costs.ran) < 5:  # the first one holds the turn
            time.sleep(0.002)
        with pytest.raises(CrowdedError):
            passed(trials, "1.9")
        assert passed(trials, "0.01") == 10, "quick ones pass"
        costs.held.set()
        assert [each.result() for each in waiting] == [1000, 1100, 1200, 1300]


def test_what_is_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the error messages for refused constraints, which are compiled on trial in real child processes.
    The last stage, for expensive ones, has a tenth of its usual time."""
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    last = replace(STAGES[-1], seconds=0.2, places=0, patience=LONG)
    monkeypatch.setattr(grammars, "_trials", Trials(grammars._tokens, (STAGES[0], last)))
    costly = [schema_constraint({"type": "integer", "multipleOf": 999983 + i}, "s") for i in range(2)]
    with grammars._trials.tries[1].turns.turn(), pytest.raises(RequestError) as refused:
        grammars.compiled(costly[0], False)
    assert refused.value.status == 503
    assert "waits for other constraints that take long to compile: try again later" in str(refused.value)
    with pytest.raises(RequestError, match=r"more than 0\.2 s or 128 MiB") as refused:
        grammars.compiled(costly[1], False)
    assert refused.value.status == 400
    assert grammars.compiled(Constraint("regex", "quick", "x"), message=False)
    grammars.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_last_stage_yields_the_cores_to_others() -> None:
    trials: Trials[int] = Trials(GRAMMARS["json"]._tokens, (Stage(2.0, 1, LONG, niceness=7),))
    try:
        assert isinstance(passed(trials, 'start: "a"'), int)
        process = trials.tries[0].trial._child.process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
    finally:
        trials.close()
