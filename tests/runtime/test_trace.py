"""Tests of the trace file, event by event, without an engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_runtime.engine.trace import Trace


def events(path: Path) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(path.read_text())
    return parsed[2:]  # the names of process and thread


def test_a_step_has_two_parts(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    start = trace._start
    trace.step("decode", {3: 1, 5: 2}, (start + 1, start + 1.5, start + 1.75))
    trace.close()
    step, model, tokens = events(path)
    assert step["name"] == "decode 3" and step["ph"] == "X"
    assert step["args"] == {"batch": 2, "requests": [3, 5], "tokens": [1, 2]}
    times = [(round(event["ts"]), round(event["dur"])) for event in (step, model, tokens)]
    assert times == [(1_000_000, 750_000), (1_000_000, 500_000), (1_500_000, 250_000)]
    assert [event["name"] for event in (model, tokens)] == ["model", "tokens"]


def test_requests_and_counters(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.request(4, "b", {"prompt_tokens": 9})
    trace.request(4, "n")
    trace.counters({"running": 1, "waiting": 0})
    trace.close()
    begin, first, running, waiting = events(path)
    assert (begin["ph"], begin["name"], begin["id"]) == ("b", "request", 4)
    assert begin["args"] == {"prompt_tokens": 9}
    assert (first["ph"], first["name"]) == ("n", "first token") and "args" not in first
    assert (running["args"], waiting["args"]) == ({"running": 1}, {"waiting": 0})
    assert (running["ph"], running["name"]) == ("C", "running")


def test_a_trace_without_its_end_lacks_only_the_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.request(1, "b")
    trace._out.flush()
    assert len(json.loads(path.read_text() + "]")) == 3
    trace.close()
    trace.request(1, "e")  # after the end: ignored
    trace.close()
    assert len(json.loads(path.read_text())) == 3


def test_a_full_disk_ends_the_trace_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        closed = False

        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed = True

    trace = Trace(tmp_path / "trace.json")
    trace._out.close()
    full = Full()
    trace._out = full  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        trace.request(1, "b")
        trace.request(2, "b")
    assert full.closed
    (record,) = caplog.records
    assert record.getMessage().endswith("cannot be written any more: [Errno 28] No space left on device")
