"""Tests of standard streams that a caller has closed, and of the files that a run writes for CI systems."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlcbuild.cli import standard_streams, summaries
from mlcbuild.errors import UsageError


class Broken(io.StringIO):
    """A stream whose flush fails with an error."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def flush(self) -> None:
        raise self._error


def test_closed_streams_discard_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    open_one = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", open_one)
    standard_streams.open_closed()
    assert sys.stdout is not None and sys.stderr is open_one
    sys.stdout.write("x")
    sys.stdout.close()


@pytest.mark.parametrize(
    ("error", "fine", "words"),
    [
        (BrokenPipeError(), True, ""),
        (OSError(28, "No space left on device"), False, "No space left on device"),
    ],
)
def test_only_a_reader_that_left_is_no_error(
    error: OSError, fine: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced: list[None] = []
    stderr = io.StringIO()
    monkeypatch.setattr(standard_streams, "silence", lambda: silenced.append(None))
    monkeypatch.setattr(sys, "stdout", Broken(error))
    monkeypatch.setattr(sys, "stderr", stderr)
    assert standard_streams.flushed() == fine and silenced == [None]
    assert words in stderr.getvalue() and bool(words) == bool(stderr.getvalue())


def test_outputs_that_cannot_be_written_are_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "kept.md").write_text("before")
    fine = argparse.Namespace(junit=str(tmp_path / "j.xml"), summary=str(tmp_path / "kept.md"))
    summaries.check_writable(fine)
    assert (tmp_path / "kept.md").read_text() == "before"
    wrong = argparse.Namespace(junit=None, summary=str(tmp_path / "no" / "s.md"))
    with pytest.raises(UsageError, match=r"s\.md: cannot be written: No such file or directory"):
        summaries.check_writable(wrong)


def test_a_named_pipe_without_a_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks named pipes as files for a run's summary: a pipe that no process reads is refused at once,
    instead of waiting for a reader, and a pipe with a reader is accepted."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pipe))
    with pytest.raises(UsageError, match=r"pipe: cannot be written: "):
        summaries.check_writable(argparse.Namespace(junit=None, summary=None))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    summaries.check_writable(argparse.Namespace(junit=None, summary=str(pipe)))
    os.close(reader)


def test_speeds_are_lines_of_variants_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [
        SimpleNamespace(name="a", figures={"p": 900.4, "other": 1.0, "d": 50.6}),
        SimpleNamespace(name="b", figures={"other": 1.0}),
    ]
    log: Any = SimpleNamespace(variants=variants)
    monkeypatch.setattr("mlcbuild.reports.runlog.speeds", lambda _: {"p": "prefill", "d": "decode"})
    assert summaries.speeds(log) == ["speed   a  prefill: 900 tok/s, decode: 51 tok/s"]
