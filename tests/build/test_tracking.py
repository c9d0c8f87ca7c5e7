"""Tests of the state machine of steps: the allowed transitions, and what the result of a step changes for the
steps that depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build.events import Event, StepFinished, StepResult
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.build.plan import Planner
from mlcbuild.build.tracking import TRANSITIONS, StepState, TrackedStep, Tracker
from mlcbuild.build.usage import Notes
from mlcbuild.errors import StepError
from mlcbuild.signals import Bell, Interruption
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store

INLINE = Options(executor="inline")


def step(name: str, *needs: str) -> Step:
    return Step(name, "tests.actions:text", {"text": name}, {need: Input(need) for need in needs})


# a -> b -> d, a -> c -> d, e alone
GRAPH = Graph([step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c"), step("e")])


class Run:
    """A tracker of steps without workers: the test itself decides how each step ends."""

    def __init__(self, store: Store, options: Options = INLINE) -> None:
        self.events: list[Event] = []
        self.planner = Planner(GRAPH, store)
        with Bell() as bell:
            self.end = Interruption(bell, lambda: None)
            self.tracker = Tracker(self.planner, Notes(self.planner), options, self.events.append, self.end)

    def states(self) -> dict[str, str]:
        return {name: item.state.name for name, item in self.tracker.steps.items()}

    def start(self) -> list[str]:
        """Starts all steps that are ready, and returns their names in order."""
        started: list[str] = []

        def start(item: TrackedStep) -> bool:
            self.tracker.move(item, StepState.RUNNING)
            started.append(item.name)
            return True

        self.tracker.start_ready(start, lambda: True)
        return started


@pytest.fixture
def records(tmp_path: Path) -> dict[str, Record]:
    """Returns step name -> record of its result, from a build in another store."""
    result = execute(GRAPH, Store(tmp_path / "other"), INLINE)
    return {item.name: item.record for item in result.steps if item.record is not None}


def built(name: str, records: dict[str, Record]) -> StepResult:
    return StepResult(name, "built", records[name].key, record=records[name])


def test_the_table_names_every_state_and_every_step_can_end() -> None:
    assert set(TRANSITIONS) == set(StepState)
    assert all(StepState.DONE in after for state, after in TRANSITIONS.items() if state is not StepState.DONE)
    assert all(state not in after for state, after in TRANSITIONS.items())
    into = {state: {before for before, after in TRANSITIONS.items() if state in after} for state in StepState}
    assert into[StepState.RUNNING] == {StepState.READY}, "only a ready step starts"


@pytest.mark.parametrize(
    "state", [state for state in StepState if state not in TRANSITIONS[StepState.PENDING]]
)
def test_a_transition_that_is_not_in_the_table_is_refused(store: Store, state: StepState) -> None:
    run = Run(store)
    with pytest.raises(AssertionError, match=f"d: PENDING -> {state.name}"):
        run.tracker.move(run.tracker.steps["d"], state)


def test_steps_become_ready_as_their_inputs_are_settled(store: Store, records: dict[str, Record]) -> None:
    run = Run(store)
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "PENDING", "d": "PENDING", "e": "READY"}
    assert run.start() == ["a", "e"], "the longest chain comes first"
    run.tracker.settle(built("a", records))
    assert run.states() == {"a": "DONE", "b": "READY", "c": "READY", "d": "PENDING", "e": "RUNNING"}
    assert run.start() == ["b", "c"]
    run.tracker.settle(built("b", records))
    assert run.states()["d"] == "PENDING" and run.tracker.steps["d"].missing == {"c"}
    run.tracker.settle(built("c", records))
    assert run.states()["d"] == "READY" and not run.tracker.is_complete
    for name in ("d", "e"):
        run.start()
        run.tracker.settle(built(name, records))
    assert run.tracker.is_complete and set(run.tracker.results()) == set("abcde")


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_failure_skips_what_needs_it(store: Store, keep_going: bool) -> None:
    run = Run(store, replace(INLINE, keep_going=keep_going))
    run.start()
    run.tracker.settle(StepResult("a", "failed", error=StepError("no")))
    assert {name: result.status for name, result in run.tracker.results().items()} == {
        "a": "failed",
        "b": "skipped",
        "c": "skipped",
        "d": "skipped",
    }
    assert run.tracker.results()["b"].reason == "needs a, which failed"
    assert run.tracker.stopping == ("" if keep_going else "not started: a failed")
    names = [event.result.name for event in run.events if isinstance(event, StepFinished)]
    assert sorted(names) == ["a", "b", "c", "d"], "each is reported once"


def test_an_interrupted_run_starts_nothing_behind_a_result(store: Store, records: dict[str, Record]) -> None:
    run = Run(store)
    run.start()
    run.end.reason = "SIGINT"
    run.tracker.settle(built("a", records))
    assert run.states()["b"] == "PENDING"


def test_a_step_that_does_not_fit_stays_ready(store: Store) -> None:
    run = Run(store)
    offered: list[str] = []

    def refuse(item: TrackedStep) -> bool:
        offered.append(item.name)
        return False

    run.tracker.start_ready(refuse, lambda: True)
    run.tracker.start_ready(refuse, lambda: len(offered) < 3)
    assert offered == ["a", "e", "a"] and run.tracker.queued == 2


def test_a_step_is_demoted_once_and_its_users_wait_for_it(store: Store, records: dict[str, Record]) -> None:
    """Checks the case of a step `a` whose record a remote has, but one of whose files it cannot send: `a` is
    built once, and the steps that read the file wait for it."""
    run = Run(store)
    run.start()
    run.tracker.settle(built("a", records))
    a, b, c = (run.tracker.steps[name] for name in "abc")
    a.remote = replace(a.planned, state="remote", record=records["a"])
    for user in (b, c):
        user.requests = frozenset({1})
        run.tracker.move(user, StepState.FETCHING)
    run.tracker.demote(a, "404")
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "PENDING", "d": "PENDING", "e": "RUNNING"}
    assert a.planned.reason == "its files cannot be fetched: 404" and a.result is None and a.remote is None
    run.tracker.demote(a, "again")
    assert a.planned.reason == "its files cannot be fetched: 404"
    assert run.start() == ["a"]
    b.requests = frozenset()
    run.tracker.settle(built("a", records))
    assert run.states()["b"] == "READY" and run.states()["c"] == "FETCHING", "c's other download goes on"


def test_a_step_whose_own_files_are_on_their_way_can_be_demoted(
    store: Store, records: dict[str, Record]
) -> None:
    """Checks the case of a step that waits for its own download while the download of its files for another
    step fails: it is built after its own download has ended."""
    run = Run(store)
    e = run.tracker.steps["e"]
    run.start()
    e.remote = replace(e.planned, state="remote", record=records["e"])
    e.requests = frozenset({7})
    run.tracker.move(e, StepState.ARRIVING)
    run.tracker.demote(e, "404")
    assert e.state is StepState.FETCHING
    run.tracker.arrived(e)
    assert e.state is StepState.FETCHING, "what arrives now settles nothing"
