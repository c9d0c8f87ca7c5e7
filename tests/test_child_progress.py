"""Tests of passing the progress of a child process to its parent through a file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from mlcbuild import child_progress, progress


class Process:
    """A stand-in for a child process that reports its progress in the file `note`. Each wait with a timeout
    writes one of `notes` to the file and times out; when none is left, the process has ended with exit code
    3."""

    def __init__(self, note: Path, *notes: str) -> None:
        self.calls: list[str] = []
        self._note, self._notes = note, list(notes)

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append("wait" if timeout is None else "poll")
        if not self._notes or timeout is None:
            return 3
        self._note.write_text(self._notes.pop(0))
        raise subprocess.TimeoutExpired("child", timeout)

    def kill(self) -> None:
        self.calls.append("kill")


def wait(process: Process, note: Path, seconds: float = float("inf")) -> int:
    return child_progress.wait(cast("subprocess.Popen[bytes]", process), note, seconds)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, str]]]:
    """Yields the list to which the listener of this process appends every report."""
    monkeypatch.setattr(progress, "_PERIOD", -1.0)
    received: list[tuple[int, int, str]] = []
    progress.listen(lambda *report: received.append(report))
    yield received
    progress.listen(None)


def test_what_a_child_writes_is_reported_until_it_ends(
    reports: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    note = tmp_path / "progress"
    process = Process(note, "1 10 functions", "", "2 x functions", "4 10 functions")
    assert wait(process, note) == 3
    # The second and third note are still being written, and the last one is read again after the end.
    assert reports == [(1, 10, "functions"), (4, 10, "functions"), (4, 10, "functions")]
    assert process.calls == ["poll"] * 5


@pytest.mark.parametrize("unit", ["", "kernels", "pairs of tokens"])
def test_a_unit_of_any_number_of_words_is_reported(
    unit: str, reports: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    note = tmp_path / "progress"
    child_progress.write_to(note)
    progress.report(5, 9, unit)
    progress.listen(lambda *report: reports.append(report))
    assert wait(Process(note), note) == 3
    assert reports == [(5, 9, unit)]


def test_a_child_without_a_note_is_waited_for(reports: list[tuple[int, int, str]], tmp_path: Path) -> None:
    assert wait(Process(tmp_path / "progress"), tmp_path / "progress") == 3
    assert reports == []


def test_a_child_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    process = Process(tmp_path / "progress", "1 2 x")
    with pytest.raises(subprocess.TimeoutExpired):
        wait(process, tmp_path / "progress", seconds=0)
    assert process.calls == ["poll", "kill", "wait"]


def test_an_interrupted_parent_kills_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PERIOD", -1.0)
    process = Process(tmp_path / "progress", "1 2 x")

    def interrupted(done: int, total: int, unit: str) -> None:
        raise KeyboardInterrupt

    progress.listen(interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait(process, tmp_path / "progress")
    finally:
        progress.listen(None)
    assert process.calls == ["poll", "kill", "wait"]


def test_a_child_writes_its_reports(reports: list[tuple[int, int, str]], tmp_path: Path) -> None:
    child_progress.write_to(tmp_path / "progress")
    progress.report(5, 9, "kernels")
    assert (tmp_path / "progress").read_text() == "5 9 kernels"
    assert reports == [], "the file replaces the listener"
