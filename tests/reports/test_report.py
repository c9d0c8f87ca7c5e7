"""Tests of what a run prints: plain lines, the live view, and the JSON document."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from mlcbuild.build.events import (
    Event,
    Noted,
    RunFinished,
    RunResult,
    RunStarted,
    SourceRead,
    StepFetched,
    StepFetching,
    StepFinished,
    StepPlaced,
    StepProgress,
    StepResult,
    StepStarted,
    StepWaiting,
    Uploading,
    Warned,
    silent,
)
from mlcbuild.canon import Entry, Tree
from mlcbuild.errors import StepError
from mlcbuild.reports.report import (
    Lines,
    View,
    amount,
    document,
    reporting,
    summary,
)
from mlcbuild.reports.tally import Tally
from mlcbuild.store.records import BuildInfo, Preimage, Record

ROOT = Path(__file__).resolve().parent.parent.parent
LOG = Path("/store/logs/bad.log")
RECORD = Record.create(
    "00" * 32, Tree.of([Entry("f", "11" * 32, 2_500_000)]), BuildInfo("a", Preimage("", {}, {}, {}, {}))
)
BUILT = StepResult("weights/a", "built", "00" * 32, 75.4, "scheme: bits 4 -> 8", RECORD, log=LOG)
FAILED = StepResult("bad", "failed", "22" * 32, 0.25, "never built", error=StepError("it broke"), log=LOG)
SKIPPED = StepResult("after", "skipped", reason="needs bad, which failed")
REUSED = StepResult("library/a", "reused", "33" * 32, record=RECORD)
RESULT = RunResult((REUSED, BUILT, FAILED, SKIPPED), 80.0)
EVENTS: list[Event] = [
    SourceRead(Path("model.safetensors"), 5_000_000_000),
    RunStarted(4, 1),
    StepStarted("weights/a", "scheme: bits 4 -> 8", 61.0, LOG),
    StepStarted("bad", "never built", None, LOG),
    StepWaiting("other", "pid 42"),
    StepProgress("weights/a", 1_000_000, 4_000_000, "B"),
    Warned("a blob was damaged"),
    Noted("weights/a: left out x"),
    StepFinished(BUILT),
    StepFinished(FAILED, "first line\nlast line"),
    StepFinished(SKIPPED),
    RunFinished(RESULT),
]


def test_plain_lines_are_exactly_these() -> None:
    stream = io.StringIO()
    report = Lines(stream)
    for event in EVENTS:
        report(event)
        silent(event)
    assert (
        stream.getvalue()
        == """\
read    model.safetensors (5.0 GB)
start   weights/a (scheme: bits 4 -> 8, 1 min 01 s last time)
start   bad (never built)
wait    other: waiting for another mlcbuild (pid 42)
warning a blob was damaged
note    weights/a: left out x
built   [2/4] weights/a in 1 min 15 s, 2.5 MB
failed  [3/4] bad after 0.25 s: it broke
  first line
  last line
  log: /store/logs/bad.log
skipped [4/4] after: needs bad, which failed
1 built, 1 reused, 1 failed, 1 skipped in 1 min 20 s
"""
    )


def test_the_live_view_shows_running_steps_and_keeps_finished_ones() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, force_terminal=True, width=100, color_system=None))
    for event in EVENTS[:8]:
        view(event)
    time.sleep(0.01)
    view.console.print(view.render())
    shown = stream.getvalue()
    assert "a blob was damaged" in shown
    assert "1.0 MB of 4.0 MB" in shown
    assert "other" in shown and "for another mlcbuild (pid 42)" in shown
    assert "1 of 4 steps" in shown and "2 running" in shown
    for event in EVENTS[8:]:
        view(event)
    lines = stream.getvalue()
    assert "built   weights/a in 1 min 15 s, 2.5 MB" in lines
    assert "  last line" in lines
    assert lines.rstrip().endswith("1 built, 1 reused, 1 failed, 1 skipped in 1 min 20 s")


def test_time_left_comes_from_progress_or_the_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tally = Tally()
    tally.note(StepStarted("a", "", 60.0, LOG))
    tally.note(StepStarted("b", "", None, LOG))
    tally.note(StepStarted("c", "", 2.0, LOG))
    tally.note(StepStarted("d", "", None, LOG, typical=30.0))
    now = 1010.0
    assert tally.left("a") == 50.0
    assert tally.left("d") == 20.0
    assert tally.left("b") is None
    assert tally.left("c") is None
    tally.note(StepProgress("a", 1, 4, "layers"))
    assert tally.left("a") == 50.0, "one report has no rate"
    now = 1015.0
    tally.note(StepProgress("a", 2, 4, "layers"))
    assert tally.left("a") == 10.0, "the rate counts from the first report, when loading had ended"
    now = 1018.0
    tally.note(StepProgress("a", 2, 4, "layers"))
    assert tally.left("a") == 7.0, "an equal count does not make the rate lower"
    now = 2000.0
    tally.note(StepProgress("a", 0, 0, "layers"))
    assert tally.left("a") is None


def test_the_summary_of_an_interrupted_run_says_what_was_kept() -> None:
    result = RunResult((BUILT, SKIPPED), 3.0, "SIGINT", ("after",))
    assert summary(result) == (
        "interrupted by SIGINT: 1 built, 0 reused, 1 skipped in 3.0 s; stopped: after. "
        "What was built is kept; run again to continue"
    )
    assert result.exit_code == 130 and not result.ok


def test_the_document_has_the_documented_form(tmp_path: Path) -> None:
    variants = [{"name": "a-q4", "bundle": "dist/a-q4", "status": "built"}]
    actual = document(RESULT, variants)
    assert actual == {
        "variants": variants,
        "steps": [
            {"name": "library/a", "key": "33" * 32, "status": "reused", "seconds": 0.0, "reason": ""},
            {
                "name": "weights/a",
                "key": "00" * 32,
                "status": "built",
                "seconds": 75.4,
                "reason": "scheme: bits 4 -> 8",
            },
            {"name": "bad", "key": "22" * 32, "status": "failed", "seconds": 0.25, "reason": "it broke"},
            {
                "name": "after",
                "key": None,
                "status": "skipped",
                "seconds": 0.0,
                "reason": "needs bad, which failed",
            },
        ],
        "seconds": 80.0,
    }


def test_amounts_for_people() -> None:
    assert amount(StepProgress("", 3, 12, "layers")) == "3 of 12 layers"
    assert amount(StepProgress("", 3, 0, "layers")) == "3 layers"
    assert amount(StepProgress("", 3, 12, "")) == "3 of 12"
    assert amount(StepProgress("", 2000, 0, "B")) == "2.0 kB"


CODE = """
import sys
from pathlib import Path
from mlcbuild.build.execute import execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.reports.report import reporting
from mlcbuild.store.store import Store
first = Step("a", "tests.actions:slow_progress", {}, {})
steps = [first, Step("b", "tests.actions:text", {}, {"x": Input("a")})]
with reporting(sys.stdout) as report:
    execute(Graph(steps), Store(Path(sys.argv[1])), None, report)
print("rich" in sys.modules)
"""


def on_a_terminal(store: Path, **environment: str) -> str:
    """Runs a small build of two steps, with its progress reported, on a pseudo terminal, and returns what it
    prints. store: directory of the build's store; environment: environment variables to set."""
    leader, follower = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in {"CI", "TERM", "COLUMNS"}}
    command = [sys.executable, "-c", CODE, str(store)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=follower, env={**kept, "TERM": "xterm", **environment}
    ) as process:
        os.close(follower)
        parts = []
        try:
            while part := os.read(leader, 65536):
                parts.append(part)
        except OSError:  # how Linux says that nobody writes any more
            pass
        os.close(leader)
    assert process.returncode == 0
    return b"".join(parts).decode()


def test_the_live_view_names_the_critical_path_and_the_worker() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, force_terminal=True, width=120, color_system=None))
    view(RunStarted(3, 0, {"weights/a": 100.0, "bundle/a": 20.0, "library/a": 30.0}))
    view(StepStarted("weights/a", "", 80.0, Path("log")))
    view(StepPlaced("weights/a", "rack7"))
    view.console.print(view.render())
    assert "weights/a on rack7" in stream.getvalue()
    assert "critical path: weights/a  at least 1 min 40 s left" in stream.getvalue()
    view(StepFinished(StepResult("weights/a", "built")))
    view(StepFinished(StepResult("library/a", "built")))
    view.console.print(view.render())
    assert "critical path: bundle/a  at least 20.0 s left" in stream.getvalue()


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_keeps_names_and_times(width: int) -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, force_terminal=True, width=width, color_system=None))
    name = "library/343feef55213/q4a8_1/host"
    view(RunStarted(15, 3, {name: 100.0}))
    view(StepStarted(name, "never built", None, LOG, "tiny", 30.0))
    view(StepStarted("verify/tiny-q0f32-host", "never built", None, LOG))
    view(StepProgress("verify/tiny-q0f32-host", 20, 640, "tokens"))
    view.console.print(view.render())
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and len(lines) == 6
    assert lines[0].startswith(f"{name} for ti")
    assert re.fullmatch(r"  \d\.\d+ s, [\d.]+ s left", lines[1])
    assert lines[2] == "verify/tiny-q0f32-host" and "20 of 640 tokens" in lines[3]
    assert lines[4] == "3 of 15 steps" and lines[5].startswith("  2 running, critical path")


def test_a_terminal_gets_the_live_view(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path / "store")
    assert "\x1b[" in shown
    assert "2 of 3 layers" in shown
    assert "2 built, 0 reused in" in shown


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_ci_and_dumb_terminals_get_lines_without_loading_rich(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shown = on_a_terminal(tmp_path / "store", **environment)
    assert "\x1b[" not in shown
    assert "start   a (never built)" in shown
    assert shown.rstrip().endswith("False")


def test_a_file_gets_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream, reporting(stream) as report:
        report(RunFinished(RESULT))
    assert (tmp_path / "log").read_text().startswith("1 built, 1 reused")


def test_a_reused_step_that_must_run_after_all_counts_once() -> None:
    tally = Tally()
    tally.note(RunStarted(2, 1, {}, frozenset({"a"})))
    for name, status in (("a", "built"), ("b", "built"), ("a", "reused")):
        tally.note(StepFinished(StepResult(name, "built" if status == "built" else "reused")))
    assert (tally.done, tally.total) == (2, 2)


def test_an_interrupted_run_does_not_list_what_it_skipped() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for name, reason in (("a", "interrupted by SIGINT"), ("b", "needs weights/a, which failed")):
        lines(StepFinished(StepResult(name, "skipped", reason=reason)))
    assert stream.getvalue() == "skipped [2/0] b: needs weights/a, which failed\n"


def test_a_download_for_several_steps_has_one_line() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines(RunStarted(3, 0))
    for _ in range(3):
        lines(StepFetching("tokenizer/a", "file:///remote", 65))
    lines(StepFetched("tokenizer/a"))
    lines(StepFetching("tokenizer/a", "file:///remote", 65))
    lines(Uploading(1))
    lines(Uploading(2))
    fetch = "fetch   tokenizer/a (65 B from file:///remote)"
    assert stream.getvalue().splitlines() == [
        fetch,
        fetch,
        "upload  1 result is still on its way to the shared cache",
        "upload  2 results are still on their way to the shared cache",
    ]


class Pipe(io.StringIO):
    """A stream whose reader may go, after which nothing can be written."""

    is_open = True

    def flush(self) -> None:
        if not self.is_open:
            raise BrokenPipeError


def test_a_log_whose_reader_has_gone_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcbuild.reports.report.PULSE", 0.05)
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    stream = Pipe()
    lines = Lines(stream)
    with lines.beating():
        (beat,) = (thread for thread in threading.enumerate() if "_beat" in thread.name)
        lines(StepStarted("library/12/q4/host", "never built", None, LOG))
        stream.is_open = False
        beat.join(30)
        assert not beat.is_alive() and tracebacks == []
        with pytest.raises(BrokenPipeError):
            lines(Warned("the run's own thread raises it"))


def test_a_log_says_what_is_running_while_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcbuild.reports.report.PULSE", 0.05)
    stream = io.StringIO()
    with reporting(stream, plain=True) as report:
        report(StepStarted("library/12/q4/host", "never built", None, LOG, "tiny"))
        report(StepProgress("library/12/q4/host", 2, 12, "functions"))
        end = time.monotonic() + 30
        while "running" not in stream.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
    start, beat, *_ = stream.getvalue().splitlines()
    assert start == "start   library/12/q4/host for tiny (never built)"
    assert re.fullmatch(r"running library/12/q4/host for tiny: [\d.]+ s, 2 of 12 functions(, .*left)?", beat)
