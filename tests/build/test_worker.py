"""Tests of executing one step in one process: how inputs are provided, and what is published, logged and
refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlcbuild.build.worker import Job, JobInput, perform, tail
from mlcbuild.canon import Entry, Json, Tree, bytes_digest
from mlcbuild.errors import CheckpointError, StepError
from mlcbuild.store.records import Preimage
from mlcbuild.store.staging import StagingArea
from mlcbuild.store.store import Store
from tests import actions


def job(
    store: Store,
    area: StagingArea,
    function: str = "text",
    job_inputs: tuple[JobInput, ...] = (),
    **params: Json,
) -> Job:
    inputs = {item.argument: Tree.of(item.files) for item in job_inputs}
    preimage = Preimage(f"tests.actions:{function}", params, {}, {}, inputs)
    return Job(
        "a/step",
        preimage.key(),
        preimage,
        job_inputs,
        1,
        store.root,
        area.subdirectory(),
        store.log("a/step"),
    )


def source(path: Path) -> JobInput:
    """Returns a job's input that consists of one file outside of the store."""
    file_stat = path.stat()
    entry = Entry(path.name, bytes_digest(path.read_bytes()), file_stat.st_size)
    return JobInput("in", (entry,), path.parent, {path.name: (file_stat.st_size, file_stat.st_mtime_ns)})


def test_a_result_is_published_with_what_it_cost(store: Store, area: StagingArea) -> None:
    work = job(store, area, text="hello", sleep_ms=30)
    outcome = perform(work)
    assert outcome.error is None and outcome.record is not None
    assert outcome.record == store.record(work.key)
    assert outcome.record.info.preimage == work.preimage and outcome.record.info.step == "a/step"
    assert outcome.record.info.measured.milliseconds >= 30
    (entry,) = outcome.record.files
    assert store.read_blob(entry) == b"hello"
    assert not work.area.exists(), "the directory it worked in is gone"


def test_any_text_can_be_printed(store: Store, area: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(params: object, inputs: object, out: Path) -> None:
        sys.stdout.write("K\u00e4se \udcff\n")  # a letter, and a byte of a file name that is not UTF-8
        (out / "text.txt").write_text("x")

    monkeypatch.setattr(actions, "text", speak)
    work = job(store, area)
    assert perform(work).error is None
    assert work.log.read_bytes() == "K\u00e4se \\udcff\n".encode()


def test_an_artifact_of_another_step_is_linked_into_place(store: Store, area: StagingArea) -> None:
    first = perform(job(store, area, text="one")).record
    assert first is not None
    second = perform(job(store, area, job_inputs=(JobInput("in", first.files),), text="two")).record
    assert second is not None
    assert store.read_blob(second.files[0]) == b"two\none"


def test_a_source_is_read_where_it_lies(store: Store, area: StagingArea, tmp_path: Path) -> None:
    path = tmp_path / "user" / "data.txt"
    path.parent.mkdir()
    path.write_text("mine")
    outcome = perform(job(store, area, job_inputs=(source(path),), text="x"))
    assert outcome.record is not None and store.read_blob(outcome.record.files[0]) == b"x\nmine"


def test_a_source_that_changed_since_it_was_hashed_is_refused(
    store: Store, area: StagingArea, tmp_path: Path
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("mine")
    inputs = source(path)
    path.write_text("changed")
    work = job(store, area, job_inputs=(inputs,), text="x")
    outcome = perform(work)
    assert (
        str(outcome.error) == f"step a/step: {path} changed while the step ran; nothing was kept, run again"
    )
    assert store.record(work.key) is None


def test_source_code_that_is_not_what_the_key_says_is_refused(store: Store, area: StagingArea) -> None:
    preimage = Preimage("tests.actions:text", {}, {"mlcbuild/errors.py": "0" * 64}, {}, {})
    work = Job("s", preimage.key(), preimage, (), 1, store.root, area.subdirectory(), store.log("s"))
    outcome = perform(work)
    assert "mlcbuild/errors.py changed while the step ran" in str(outcome.error)
    assert store.record(work.key) is None


@pytest.mark.parametrize(
    ("function", "params", "kind", "words"),
    [
        ("fail", {"how": "own error"}, CheckpointError, "tensor a is missing"),
        ("nothing_of_this_name", {}, StepError, "step a/step stopped with AttributeError"),
    ],
)
def test_an_error_comes_back_and_is_in_the_log(
    store: Store, area: StagingArea, function: str, params: dict[str, Json], kind: type[Exception], words: str
) -> None:
    work = job(store, area, function, (), **params)
    outcome = perform(work)
    assert isinstance(outcome.error, kind) and words in str(outcome.error), outcome.error
    assert type(outcome.error).__name__ in work.log.read_text() or "AttributeError" in work.log.read_text()
    assert outcome.record is None and not work.area.exists()


@pytest.mark.parametrize("how", ["escapes", "python escapes"])
def test_errors_stand_in_the_log_without_control_characters(
    store: Store, area: StagingArea, how: str
) -> None:
    work = job(store, area, "fail", (), how=how)
    assert perform(work).error is not None
    assert r"\x1b[31mred" in work.log.read_text() and "\x1b" not in work.log.read_text()


def test_output_goes_to_the_log_and_streams_are_restored(
    store: Store, area: StagingArea, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    work = job(store, area, "noisy")
    assert perform(work).error is None
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("after\n", "")
    assert (sys.stdout, sys.stderr) == streams
    assert {"from python", "from native code", "from a child"} <= set(work.log.read_text().splitlines())


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(None) == tail(path) == ""
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail(path).splitlines() == [f"line {number}" for number in range(980, 1000)]
    path.write_bytes(b"\xff" * 100_000)
    assert 0 < len(tail(path)) <= 8192
