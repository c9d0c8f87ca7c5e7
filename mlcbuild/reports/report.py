"""Presents a run's events: a live view, plain lines, one JSON document."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from mlcbuild_format import sizes

from mlcbuild.build.events import (
    Event,
    Reporter,
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
)
from mlcbuild.errors import one_line, safe_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"built": "green", "failed": "red", "reused": "dim", "skipped": "yellow"}
_ETA_FROM = 3.0
"""Expected seconds of a step from which an estimate of the remaining time is shown."""


@contextmanager
def reporting(stream: TextIO, *, plain: bool | None = None) -> Iterator[Reporter]:
    """Yields the reporter for a stream: the live view on a terminal, lines elsewhere and in CI."""
    if plain is None:
        plain = not stream.isatty() or bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
    if plain:
        yield Lines(stream)
        return
    from rich.console import Console
    from rich.live import Live

    view = View(Console(file=stream))
    with Live(console=view.console, get_renderable=view.render, refresh_per_second=5, transient=True):
        yield view


@dataclass
class Tally:
    """The state of a run's steps so far."""

    total: int = 0
    done: int = 0
    running: dict[str, StepStarted | StepFetching] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    progress: dict[str, StepProgress] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    chains: dict[str, float] = field(default_factory=dict)
    """Unfinished step -> seconds from its start to the end of the longest chain after it."""
    places: dict[str, str] = field(default_factory=dict)
    """Running step -> the cluster worker that runs it."""

    def note(self, event: Event) -> None:
        """Updates the state with an event."""
        match event:
            case RunStarted():
                self.total, self.done = event.steps, event.reused
                self.chains = dict(event.chains)
            case StepStarted() | StepFetching():
                self.waiting.pop(event.name, None)
                self.started[event.name] = time.monotonic()
                self.running[event.name] = event
            case StepPlaced():
                self.places[event.name] = event.worker
                self.started[event.name] = time.monotonic()
            case StepProgress():
                self.progress[event.name] = event
            case StepWaiting():
                self.waiting[event.name] = event.holder
            case StepFetched():
                self._forget(event.name)
            case StepFinished():
                self.done += 1
                self.chains.pop(event.result.name, None)
                self._forget(event.result.name)
            case _:
                pass

    def _forget(self, name: str) -> None:
        for table in (self.running, self.started, self.progress, self.waiting, self.places):
            table.pop(name, None)

    def critical(self) -> tuple[str, float]:
        """Returns the step on the critical path and the least seconds until the run ends; ("", 0) if
        unknown."""
        now = time.monotonic()
        ends = {
            name: seconds - (now - self.started.get(name, now) if name in self.running else 0.0)
            for name, seconds in list(self.chains.items())
        }
        return max(ends.items(), key=lambda item: item[1], default=("", 0.0))

    def left(self, name: str) -> float | None:
        """Returns the estimated remaining seconds of a running step; None without progress or an earlier
        run."""
        step = self.running.get(name)
        if step is None:
            return None
        elapsed = time.monotonic() - self.started.get(name, 0.0)
        progress = self.progress.get(name)
        estimate = step.estimate if isinstance(step, StepStarted) else None
        if progress is not None and progress.total > 0 and 0 < progress.done <= progress.total:
            guess = elapsed * (progress.total - progress.done) / progress.done
        elif estimate is not None:
            guess = estimate - elapsed
        else:
            return None
        return guess if guess > 0 and guess + elapsed > _ETA_FROM else None


class Lines:
    """Prints one line per event, for logs. Steps that were hits from the start are only counted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tally = Tally()

    def __call__(self, event: Event) -> None:
        self._tally.note(event)
        for line in _lines(event, self._tally):
            self._stream.write(safe_lines(line) + "\n")
        self._stream.flush()


def _lines(event: Event, tally: Tally) -> list[str]:
    lines: list[str] = []
    match event:
        case SourceRead():
            lines = [f"read    {event.path} ({sizes.show(event.size)})"]
        case StepStarted():
            guess = f", {duration(event.estimate)} last time" if event.estimate else ""
            lines = [f"start   {event.name} ({event.reason}{guess})"]
        case StepPlaced():
            lines = [f"begin   {event.name} on {event.worker}"]
        case StepFetching():
            lines = [f"fetch   {event.name} ({sizes.show(event.size)} from {event.origin})"]
        case Uploading():
            lines = [f"upload  {event.results} results are still on their way to the shared cache"]
        case StepWaiting():
            lines = [f"wait    {event.name}: waiting for another mlcbuild ({event.holder})"]
        case StepFinished():
            lines = finished(event, f"[{tally.done}/{tally.total}] ")
        case Warned():
            lines = [f"warning {event.message}"]
        case RunFinished():
            lines = [summary(event.result)]
        case _:
            pass
    return lines


def finished(event: StepFinished, count: str = "") -> list[str]:
    """Returns the lines for a step's end, with the tail of the log for a failed one."""
    result = event.result
    head = f"{result.status:<7} {count}{result.name}"
    if result.status == "built":
        size_words = f", {sizes.show(result.record.size)}" if result.record is not None else ""
        return [f"{head} in {duration(result.seconds)}{size_words}"]
    if result.status == "failed":
        lines = [f"{head} after {duration(result.seconds)}: {result.error}"]
        # The log ends with the error itself, which the first line shows already.
        tail = event.tail.replace(f"{type(result.error).__name__}: {result.error}", "").rstrip()
        lines += ["  " + line for line in tail.splitlines()]
        return [*lines, f"  log: {result.log}"] if result.log is not None else lines
    return [f"{head}: {result.reason}" if result.reason else head]


def summary(result: RunResult) -> str:
    """Returns the last line: numbers of built, reused and other steps, the time, and why the run ended."""
    parts = [f"{result.count('built')} built", f"{result.count('reused')} reused"]
    parts += [f"{n} {status}" for status in ("failed", "skipped") if (n := result.count(status))]
    if result.not_uploaded:
        parts.append(f"{len(result.not_uploaded)} not uploaded")
    text = f"{', '.join(parts)} in {duration(result.seconds)}"
    if not result.interrupted:
        return text
    lost = f"; stopped: {', '.join(result.stopped)}" if result.stopped else ""
    return f"interrupted by {result.interrupted}: {text}{lost}. What was built is kept; run again to go on"


class View:
    """The live view: finished steps scroll by; running ones stay at the bottom with time, bytes and ETA."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._tally = Tally()

    def __call__(self, event: Event) -> None:
        self._tally.note(event)
        match event:
            case StepFinished():
                first, *rest = finished(event)
                self._print(first, _STYLES[event.result.status])
                for line in rest:
                    self._print(line, "dim")
            case SourceRead() | Uploading() | Warned() | RunFinished():
                style = "yellow" if isinstance(event, Warned) else "bold"
                self._print("\n".join(_lines(event, self._tally)), style)
            case _:
                pass

    def _print(self, line: str, style: str) -> None:
        self.console.print(safe_lines(line), style=style, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        table = Table.grid(padding=(0, 2))
        for name in list(tally.running):
            where = f" on {tally.places[name]}" if name in tally.places else ""
            table.add_row(Text(one_line(name + where), "cyan"), *(Text(cell) for cell in self._cells(name)))
        for name, holder in list(tally.waiting.items()):
            table.add_row(
                Text(name, "yellow"),
                Text("waits"),
                Text(one_line(f"for another mlcbuild ({holder})")),
                Text(""),
            )
        busy = f"{len(tally.running)} running"
        step, seconds = tally.critical()
        eta = ("", "")
        if seconds > _ETA_FROM:
            eta = f"critical path: {step}", f"at least {duration(seconds)} left"
        table.add_row(Text(f"{tally.done} of {tally.total} steps", "bold"), Text(busy), *map(Text, eta))
        return table

    def _cells(self, name: str) -> tuple[str, str, str]:
        """Returns the elapsed time, the progress and the remaining time of a step."""
        tally = self._tally
        started = tally.started.get(name)
        if started is None:  # the step ended while the view's own thread draws it
            return "", "", ""
        shown = ""
        if (progress := tally.progress.get(name)) is not None:
            shown = amount(progress)
        left = tally.left(name)
        return duration(time.monotonic() - started), shown, f"{duration(left)} left" if left else ""


def document(result: RunResult, variants: Sequence[object] = ()) -> dict[str, object]:
    """Returns the document of `run --json`. `variants` are opaque to this module."""
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


def duration(seconds: float) -> str:
    """Formats seconds: 0.12 s, 8.1 s, 3 min 04 s, 2 h 05 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def amount(progress: StepProgress) -> str:
    """Formats progress: "1.2 GB of 4.0 GB", "3 of 12 layers"."""
    if progress.unit == "B":
        done, total, unit = sizes.show(progress.done), sizes.show(progress.total), ""
    else:
        done, total, unit = str(progress.done), str(progress.total), f" {progress.unit}".rstrip()
    return f"{done} of {total}{unit}" if progress.total else f"{done}{unit}"
