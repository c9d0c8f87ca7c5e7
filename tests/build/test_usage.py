"""Tests of what a run writes to its store beside results: recent keys, and the time at which a record was
last used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.build import usage
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Step
from mlcbuild.build.plan import Planner
from mlcbuild.build.usage import Notes
from mlcbuild.store.store import Store

GRAPH = Graph([Step("a", "tests.actions:text", {"text": "a"}, {})])
HOUR = 3600


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Returns a store that has the result of step `a`, whose record claims to have been used last an hour
    ago."""
    store = Store(tmp_path / "store")
    assert execute(GRAPH, store, Options(executor="inline")).ok
    path = record_path(store)
    observed = path.stat().st_mtime - HOUR
    os.utime(path, (observed, observed))
    return Store(store.root)


def record_path(store: Store) -> Path:
    return next((store.root / "ac").rglob("?" * 64))


def test_a_plan_a_look_and_a_search_note_the_use_of_a_record(store: Store) -> None:
    path = record_path(store)
    old = path.stat().st_mtime
    uses: list[Callable[[Notes], object]] = [
        lambda notes: notes.plan(),
        lambda notes: notes.consider(GRAPH.step("a")),
        lambda notes: notes.find(path.name),
    ]
    for use in uses:
        os.utime(path, (old, old))
        assert use(Notes(Planner(GRAPH, store)))
        assert path.stat().st_mtime > old + HOUR / 2


def test_a_record_without_its_files_is_not_found(store: Store) -> None:
    key = record_path(store).name
    for blob in (store.root / "cas").rglob("?" * 64):
        blob.unlink()
    notes = Notes(Planner(GRAPH, store))
    assert notes.find(key) is None and notes.find("0" * 64) is None


def test_keys_are_written_at_the_end_and_now_and_then(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    result = execute(GRAPH, store, Options(executor="inline"))
    results = {step.name: step for step in result.steps}
    (store.root / "index.sqlite").unlink()
    fresh = Store(store.root)
    notes = Notes(Planner(GRAPH, fresh))
    notes.write_sometimes(lambda: results)
    assert Store(store.root).cache.keys("a") == [], "not so soon after the start"
    monkeypatch.setattr(usage, "_SAVE_SECONDS", -1.0)
    notes.write_sometimes(lambda: results)
    assert Store(store.root).cache.keys("a") == [result.steps[0].key]


def test_a_long_run_keeps_its_records_in_use(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    result = execute(GRAPH, store, Options(executor="inline"))
    path = record_path(store)
    old = path.stat().st_mtime - HOUR
    os.utime(path, (old, old))
    notes = Notes(Planner(GRAPH, store))
    results = {step.name: step for step in result.steps}
    notes.write(results)
    assert path.stat().st_mtime == pytest.approx(old), "noted minutes ago"
    monkeypatch.setattr(usage, "_TOUCH_SECONDS", -1.0)
    notes.write(results)
    assert path.stat().st_mtime > old + HOUR / 2
