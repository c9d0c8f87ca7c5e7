"""Tests of the order in which a run starts steps (the longest chain of earlier durations first), and of when
it looks again at a step that another process has locked."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.schedule import LockWait, estimate, outputs, weights
from mlcbuild.canon import Tree
from mlcbuild.errors import UsageError
from mlcbuild.store.records import BuildInfo, Measured, Preimage, Record
from mlcbuild.store.store import Store


def step(name: str, *needs: str) -> Step:
    return Step(name, "tests.actions:text", {"text": name}, {need: Input(need) for need in needs})


GRAPH = Graph([step("a"), step("b", "a"), step("c", "a"), step("d", "b")])


def planned(name: str, milliseconds: int | None) -> Planned:
    """Returns a planned step whose last build took so many milliseconds; None: it was never built."""
    if milliseconds is None:
        return Planned(name, "run", None, "never built")
    info = BuildInfo(name, Preimage("m:f", {}, {}, {}, {}), Measured(milliseconds))
    return Planned(name, "run", None, "", Record.create("0" * 64, Tree.of(()), info))


def test_a_chain_is_the_longest_sum_of_durations_to_the_end() -> None:
    plans = {
        name: planned(name, spent) for name, spent in {"a": 1000, "b": 200, "c": 5000, "d": None}.items()
    }
    assert weights(GRAPH, plans) == pytest.approx({"a": 6.0, "b": 0.21, "c": 5.0, "d": 0.01})
    del plans["c"]
    assert weights(GRAPH, plans) == pytest.approx({"a": 1.21, "b": 0.21, "d": 0.01}), "c has a result"


def test_an_estimate_is_what_the_last_record_measured() -> None:
    assert estimate(planned("a", 1500)) == 1.5
    assert estimate(planned("a", None)) is None
    record = planned("a", 1).record
    assert record is not None
    damaged = replace(record, rest=b'{"measured": "no"}')
    assert estimate(Planned("a", "run", None, "", damaged)) is None


def test_outputs_are_what_is_named_or_what_no_step_reads(tmp_path: Path) -> None:
    planner = Planner(GRAPH, Store(tmp_path))
    assert outputs(planner, Options()) == {"c", "d"}
    assert outputs(planner, Options(only=("b",))) == {"b"}
    assert outputs(planner, Options(only=("b",), outputs=("a", "d"))) == {"a", "d"}
    with pytest.raises(UsageError, match="no step is called 'x'"):
        outputs(planner, Options(outputs=("x",)))


def test_a_lock_is_reported_once_and_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    wait = LockWait(since=now)
    assert not wait.postpone() and now < wait.again < now + 1
    now = wait.again
    assert not wait.postpone(), "a process that cleans up holds locks for a moment"
    now += 1
    assert wait.postpone() and wait.again > now
    now += 1
    assert not wait.postpone(), "once is enough"


def test_steps_with_long_chains_start_first(tmp_path: Path) -> None:
    """Checks that a step which took long when it was built last starts before a faster one that the plan
    lists first."""
    log = tmp_path / "log"
    nodes = [
        Step(name, "tests.actions:text", {"text": name, "count": str(log), "sleep_ms": spent}, {})
        for name, spent in (("a", 0), ("b", 120))
    ]
    store, options = Store(tmp_path / "store"), Options(executor="inline")
    assert execute(Graph(nodes), store, options).ok
    assert execute(Graph(nodes), store, replace(options, force=("*",))).ok
    assert log.read_text().split() == ["a", "b", "b", "a"]
