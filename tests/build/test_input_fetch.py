"""Tests of how a step gets its input files: which files are requested from remotes, which steps wait for
them, and where a job reads them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Source, Step
from mlcbuild.build.input_fetch import InputFetcher
from mlcbuild.build.plan import Planned, Planner
from mlcbuild.build.resources import Running
from mlcbuild.build.tracking import TrackedStep
from mlcbuild.build.transfer import Fetched, Transfers
from mlcbuild.canon import Entry
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store

INLINE = Options(executor="inline")


class Requests:
    """A replacement for `Transfers` that records the requested downloads and downloads nothing."""

    def __init__(self) -> None:
        self.started: list[tuple[str, list[str]]] = []

    def fetch(self, step: str, files: Sequence[Entry]) -> int:
        self.started.append((step, [entry.path for entry in files]))
        return len(self.started)


class Place:
    """A graph of two steps for tests. A remote has the record of the first step, but the local store has none
    of its files."""

    def __init__(self, root: Path) -> None:
        (root / "data").mkdir(parents=True)
        (root / "data" / "x.txt").write_text("x")
        self.graph = Graph(
            [
                Source("data", root / "data", ("x.txt",)),
                Step("a", "tests.actions:files", {"files": {"one.txt": "1", "two.bin": "2"}}, {}),
                Step("b", "tests.actions:text", {"text": "b"}, {"all": Input("a"), "mine": Input("data")}),
                Step("c", "tests.actions:text", {"text": "c"}, {"some": Input("a", ("*.txt",))}),
            ]
        )
        other = execute(self.graph, Store(root / "other"), INLINE)
        self.records = {step.name: step.record for step in other.steps}
        self.other, self.store = Store(root / "other"), Store(root / "store")
        self.planner = Planner(self.graph, self.store)
        self.steps = {
            step.name: TrackedStep(step, place, Planned(step.name, "run", None, ""))
            for place, step in enumerate(self.planner.steps)
        }
        self.requests = Requests()
        self.session = self.store.staging()
        self.fetcher = InputFetcher(self.planner, self.steps, cast(Transfers, self.requests), self.session)
        created = self.record("a")
        self.planner.results["a"] = created
        self.steps["a"].remote = Planned("a", "remote", created.key, "from r", created, "r")

    def record(self, name: str) -> Record:
        record = self.records[name]
        assert record is not None
        return record

    def bring(self, *paths: str) -> None:
        """Copies those files of step `a` that have the names `paths` into the store, as a finished download
        would."""
        for entry in self.record("a").files:
            if entry.path in paths:
                part = self.session.subdirectory() / "part"
                part.write_bytes(self.other.read_blob(entry))
                self.store.put_blob(entry.digest, part)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def missing(place: Place, name: str) -> dict[str, list[str]]:
    files = place.fetcher.missing_inputs(place.graph.step(name))
    return {step: sorted(entry.path for entry in entries) for step, entries in files.items()}


def test_only_selected_files_that_are_not_here_are_missing(place: Place) -> None:
    assert missing(place, "b") == {"a": ["one.txt", "two.bin"]}
    assert missing(place, "c") == {"a": ["one.txt"]}
    place.bring("one.txt")
    assert missing(place, "b") == {"a": ["two.bin"]} and missing(place, "c") == {}


def test_nothing_is_missing_of_a_step_that_was_built_here(place: Place) -> None:
    place.steps["a"].remote = None
    assert missing(place, "b") == {}


def test_a_full_disk_after_a_download_costs_only_the_record(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    place.bring("one.txt", "two.bin")
    place.fetcher.fetch_all("a")
    monkeypatch.setattr(place.session, "subdirectory", full)
    source, user = place.fetcher.end(Fetched(1, ""))
    assert source is user is place.steps["a"] and place.store.record(place.record("a").key) is None


def test_a_request_is_noted_with_the_step_that_waits(place: Place) -> None:
    files = place.fetcher.missing_inputs(place.graph.step("c"))["a"]
    event = place.fetcher.fetch("a", files, "c")
    assert (event.name, event.origin, event.size) == ("a", "r", 1)
    assert place.requests.started == [("a", ["one.txt"])] and place.steps["c"].requests == {1}
    place.fetcher.fetch_all("a")
    assert place.requests.started[1] == ("a", ["one.txt", "two.bin"]) and place.steps["a"].requests == {2}
    source, user = place.fetcher.end(Fetched(1, ""))
    assert (source.name, user.name, user.requests) == ("a", "c", frozenset())
    assert place.steps["a"].requests == {2}, "another request goes on"


def test_a_record_is_kept_once_all_of_its_files_are_here(place: Place) -> None:
    key = place.record("a").key
    place.fetcher.fetch_all("a")
    place.bring("one.txt")
    place.fetcher.end(Fetched(1, "404"))
    assert place.store.record(key) is None
    place.fetcher.fetch_all("a")
    place.bring("one.txt", "two.bin")
    source, user = place.fetcher.end(Fetched(2, ""))
    assert source is user and place.store.find(key) == place.record("a")


def test_a_job_reads_sources_where_they_lie_and_artifacts_from_the_store(
    place: Place, tmp_path: Path
) -> None:
    step = place.graph.step("b")
    key = place.planner.key(step)
    lock = place.store.try_lock(key)
    assert lock is not None
    running = Running(step, Planned("b", "run", key, ""), lock, 3, place.store.log("b"))
    job = place.fetcher.job(running, tmp_path / "area", again=True)
    lock.release()
    assert (job.name, job.key, job.cores, job.again) == ("b", key, 3, True)
    assert job.key == job.preimage.key()
    inputs = {item.argument: item for item in job.inputs}
    assert inputs["all"].root is None and len(inputs["all"].files) == 2
    assert inputs["mine"].root == tmp_path / "data" and set(inputs["mine"].stats) == {"x.txt"}
