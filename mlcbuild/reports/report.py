"""Presents the events of a run, such as the start and the end of each step, as a live view on a terminal, as
plain lines, or as one JSON document."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from mlcbuild_format import sizes

from mlcbuild.build.events import (
    INTERRUPTED_BY,
    Event,
    Noted,
    Reporter,
    RunFinished,
    RunResult,
    SourceRead,
    StepFetching,
    StepFinished,
    StepPlaced,
    StepProgress,
    StepResult,
    StepStarted,
    StepWaiting,
    Uploading,
    Warned,
)
from mlcbuild.durations import duration
from mlcbuild.errors import one_line, safe_lines
from mlcbuild.reports.tally import ETA_FROM, Tally

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mlcbuild.reports.runlog import RunLog

_STYLES = {"built": "green", "failed": "red", "reused": "dim", "skipped": "yellow"}
PULSE = 15.0
"""Seconds without output after which a line is printed for each running step."""
_WIDE = 100
"""Minimum number of columns of a terminal with which the live view shows a running step in one row instead of
two.
"""


@contextmanager
def reporting(stream: TextIO, *, plain: bool | None = None) -> Iterator[Reporter]:
    """Returns a context that yields the function which receives a run's events and shows them on a stream.
    plain: True for lines, False for the live view; None: the live view on a terminal, lines elsewhere, in CI
    (environment variable CI not empty) and on terminals that cannot move the cursor (TERM=dumb)."""
    if plain is None:
        plain = not stream.isatty() or bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
    if plain:
        lines = Lines(stream)
        with lines.beating():
            yield lines
        return
    from rich.console import Console
    from rich.live import Live

    view = View(Console(file=stream))
    with Live(console=view.console, get_renderable=view.render, refresh_per_second=5, transient=True):
        yield view


class Lines:
    """Prints the events of a run as lines, for logs: large sources that are hashed, starts and ends of steps,
    downloads, uploads, waits, messages and the run's end, but no progress. The end of its log follows the
    line of a failed step. Steps whose results are reused from the start, and those that an interruption
    skips, are only counted.

    Inside the context `beating`, a line for each running step is printed after PULSE seconds without output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tally = Tally()
        self._writing = threading.Lock()
        self._last = time.monotonic()
        """Time at which the last line was printed, as time.monotonic returns it."""

    def __call__(self, event: Event) -> None:
        with self._writing:
            # Several steps may wait for files of one step: its download has one line.
            is_known = isinstance(event, StepFetching) and event.name in self._tally.running
            self._tally.note(event)
            self._write([] if is_known else _lines(event, self._tally))

    def _write(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._stream.write(safe_lines(line) + "\n")
            self._last = time.monotonic()
        self._stream.flush()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Returns a context in which a thread prints a line for each running step whenever nothing was
        printed for PULSE seconds. The thread ends with the context.
        """
        end = threading.Event()
        thread = threading.Thread(target=self._beat, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _beat(self, end: threading.Event) -> None:
        # If the stream cannot be written, the next event raises the same error in the run's own thread.
        with suppress(OSError):
            while not end.wait(max(self._last + PULSE - time.monotonic(), 0.05)):
                with self._writing:
                    if time.monotonic() - self._last >= PULSE:
                        self._last = time.monotonic()
                        self._write(_pulse(self._tally))


def _pulse(tally: Tally) -> list[str]:
    """Returns a line of text for each running step: the time since its start, its progress, and an estimate
    of the remaining time, the last two if they are known."""
    lines = []
    for name, event in tally.running.items():
        words = [duration(time.monotonic() - tally.started[name])]
        if (progress := tally.progress.get(name)) is not None:
            words.append(amount(progress))
        if left := tally.left(name):
            words.append(f"{duration(left)} left")
        lines.append(f"running {_titled(event)}: {', '.join(words)}")
    return lines


def _lines(event: Event, tally: Tally) -> list[str]:
    lines: list[str] = []
    match event:
        case SourceRead():
            lines = [f"read    {event.path} ({sizes.show(event.size)})"]
        case StepStarted():
            guess = f", {duration(event.estimate)} last time" if event.estimate else ""
            lines = [f"start   {_titled(event)} ({event.reason}{guess})"]
        case StepPlaced():
            lines = [f"begin   {event.name} on {event.worker}"]
        case StepFetching():
            lines = [f"fetch   {event.name} ({sizes.show(event.size)} from {event.origin})"]
        case Uploading():
            one = event.results == 1
            count = (
                "1 result is still on its way" if one else f"{event.results} results are still on their way"
            )
            lines = [f"upload  {count} to the shared cache"]
        case StepWaiting():
            lines = [f"wait    {event.name}: waiting for another mlcbuild ({event.holder})"]
        case StepFinished() if not _is_cut_off(event):
            lines = finished(event, f"[{tally.done}/{tally.total}] ")
        case Warned():
            lines = [f"warning {event.message}"]
        case Noted():
            lines = [f"note    {event.message}"]
        case RunFinished():
            lines = [summary(event.result)]
        case _:
            pass
    return lines


def _titled(event: StepStarted | StepFetching) -> str:
    """Returns a step's name, followed by " for " and the model or other object on which it works unless the
    name contains that."""
    subject = event.subject if isinstance(event, StepStarted) else ""
    return f"{event.name} for {subject}" if subject else event.name


def _is_cut_off(event: StepFinished) -> bool:
    """Returns True if the step of an event was skipped because the run was interrupted. Such steps have no
    line in the output; the run's summary counts them."""
    return event.result.status == "skipped" and event.result.reason.startswith(INTERRUPTED_BY)


def finished(event: StepFinished, count: str = "") -> list[str]:
    """Returns the lines of text that report a step's end, with the end of its log and the log's path if the
    step failed. count: text that is put in front of the step's name, such as "[3/12] "."""
    result = event.result
    head = f"{result.status:<7} {count}{result.name}"
    if result.status == "built":
        size_words = f", {sizes.show(result.record.size)}" if result.record is not None else ""
        return [f"{head} in {duration(result.seconds)}{size_words}"]
    if result.status == "failed":
        lines = [f"{head} after {duration(result.seconds)}: {result.error}"]
        # The log ends with the error itself, which is in the first line already.
        tail = event.tail.replace(f"{type(result.error).__name__}: {result.error}", "").rstrip()
        lines += ["  " + line for line in tail.splitlines()]
        return [*lines, f"  log: {result.log}"] if result.log is not None else lines
    return [f"{head}: {result.reason}" if result.reason else head]


def counts(result: RunResult | RunLog) -> str:
    """Returns the numbers of a run's steps by outcome, such as "4 built, 2 reused, 1 failed". Failed and
    skipped steps are mentioned only if there are some."""
    parts = [f"{result.count('built')} built", f"{result.count('reused')} reused"]
    parts += [f"{n} {status}" for status in ("failed", "skipped") if (n := result.count(status))]
    return ", ".join(parts)


def summary(result: RunResult) -> str:
    """Returns the last line of a run's output: numbers of built, reused and other steps, the number of
    results that were not uploaded, the time, and for an interrupted run what interrupted it and which steps
    it stopped.
    """
    waiting = f", {len(result.not_uploaded)} not uploaded" if result.not_uploaded else ""
    text = f"{counts(result)}{waiting} in {duration(result.seconds)}"
    if not result.interrupted:
        return text
    lost = f"; stopped: {', '.join(result.stopped)}" if result.stopped else ""
    return f"interrupted by {result.interrupted}: {text}{lost}. What was built is kept; run again to continue"


class View:
    """The live view of a run on a terminal. Lines of finished steps scroll by; running ones stay at the
    bottom with elapsed time, progress and remaining time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._tally = Tally()

    def __call__(self, event: Event) -> None:
        self._tally.note(event)
        match event:
            case StepFinished() if not _is_cut_off(event):
                first, *rest = finished(event)
                self._print(first, _STYLES[event.result.status])
                for line in rest:
                    self._print(line, "dim")
            case SourceRead() | Uploading() | Warned() | Noted() | RunFinished():
                style = "yellow" if isinstance(event, Warned) else "bold"
                self._print("\n".join(_lines(event, self._tally)), style)
            case _:
                pass

    def _print(self, line: str, style: str) -> None:
        self.console.print(safe_lines(line), style=style, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for style, title, *cells in self._rows():
            if self.console.width >= _WIDE:
                table.add_row(Text(title, style), *map(Text, cells))
                continue
            table.add_row(Text(title, style, no_wrap=True, overflow="ellipsis"))
            if any(cells):
                more = f"  {', '.join(filter(None, cells))}"
                table.add_row(Text(more, no_wrap=True, overflow="ellipsis"))
        return table

    def _rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yields one table row (style of the title on the terminal, title, three texts) for each running
        step, each step that waits for another mlcbuild process which builds it, and the whole run. The texts
        of a running step are elapsed time, progress and remaining time; of a waiting one "waits", a
        description of that process, and ""; of the run the number of running steps, the step that begins the
        critical path, and the least time left. "" stands for what is unknown, and for remaining time that is
        too short to be shown."""
        tally = self._tally
        for name in list(tally.running):
            where = f" on {tally.places[name]}" if name in tally.places else ""
            title = _titled(tally.running[name]) if name in tally.running else name
            yield "cyan", one_line(title + where), *self._cells(name)
        for name, holder in list(tally.waiting.items()):
            yield "yellow", name, "waits", one_line(f"for another mlcbuild ({holder})"), ""
        step, seconds = tally.critical()
        path, left = "", ""
        if seconds > ETA_FROM:
            path, left = f"critical path: {step}", f"at least {duration(seconds)} left"
        yield "bold", f"{tally.done} of {tally.total} steps", f"{len(tally.running)} running", path, left

    def _cells(self, name: str) -> tuple[str, str, str]:
        """Returns (elapsed time, progress, remaining time) of a running step as texts; progress is "" if it
        is unknown, and remaining time if it is unknown or the whole step is expected to take at most ETA_FROM
        seconds. Returns three times "" if the step has ended meanwhile."""
        tally = self._tally
        started = tally.started.get(name)
        if started is None:  # The step ended while the view's thread draws it.
            return "", "", ""
        shown = ""
        if (progress := tally.progress.get(name)) is not None:
            shown = amount(progress)
        left = tally.left(name)
        return duration(time.monotonic() - started), shown, f"{duration(left)} left" if left else ""


def document(result: RunResult, variants: Sequence[object] = ()) -> dict[str, object]:
    """Returns the document that `mlcbuild run --json` prints, as a dict: "variants" is a copy of `variants`,
    JSON objects that describe the variants of the run; "steps" has name, key, status, seconds and reason (of
    a failed step, its error) of each step; and "seconds" is the duration of the run."""
    return {
        "variants": list(variants),
        "steps": [_step_json(step) for step in result.steps],
        "seconds": round(result.seconds, 3),
    }


def _step_json(step: StepResult) -> dict[str, object]:
    return {
        "name": step.name,
        "key": step.key,
        "status": step.status,
        "seconds": round(step.seconds, 3),
        "reason": str(step.error) if step.error is not None else step.reason,
    }


def amount(progress: StepProgress) -> str:
    """Returns the progress of a step as text, such as "1.2 GB of 4.0 GB" or "3 of 12 layers", or only the
    first part, such as "1.2 GB", if the total is unknown (0)."""
    if progress.unit == "B":
        done, total, unit = sizes.show(progress.done), sizes.show(progress.total), ""
    else:
        done, total, unit = str(progress.done), str(progress.total), f" {progress.unit}".rstrip()
    return f"{done} of {total}{unit}" if progress.total else f"{done}{unit}"
