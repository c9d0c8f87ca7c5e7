"""Tests that steps which run at the same time share the cores and the memory of this machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild import machine
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph
from mlcbuild.store.store import Store
from tests.build.runs import step


def overlaps(log: Path) -> int:
    """Returns the largest number of steps that ran at one time. log: file with the start and end of each
    step."""
    marks = []
    for line in log.read_text().splitlines():
        started, ended = map(float, line.split())
        marks += [(started, 1), (ended, -1)]
    running = peak = 0
    for _, change in sorted(marks):
        running += change
        peak = max(peak, running)
    return peak


@pytest.mark.parametrize(
    ("jobs", "memory", "needs", "expected"),
    [(4, 100, 10, 4), (1, 100, 10, 1), (4, 100, 60, 1), (4, 100, 50, 2), (4, 100, 1000, 1)],
)
def test_cores_and_memory_bound_what_runs_at_once(
    tmp_path: Path, *, jobs: int, memory: int, needs: int, expected: int
) -> None:
    store = Store(tmp_path / "store")
    log = tmp_path / "log"
    graph = Graph([step(f"s{n}", "interval", memory=needs, text=str(n), log=str(log)) for n in range(4)])
    assert execute(graph, store, Options(jobs=jobs, memory=memory)).ok
    assert overlaps(log) <= expected
    assert expected < 4 or overlaps(log) >= 2  # on a busy machine not all four need meet


def test_a_step_that_measures_runs_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = [step(f"s{n}", "interval", text=str(n), log=str(log)) for n in range(4)]
    graph = Graph([replace(actual, alone=True) for actual in steps])
    assert execute(graph, Store(tmp_path / "store"), Options(jobs=4)).ok
    assert overlaps(log) == 1


def test_this_machine_has_something_to_share() -> None:
    assert machine.cores() >= 1
    assert machine.memory() > 100 << 20
    assert re.fullmatch(rf".+, {machine.cores()} cores", machine.kind())
