"""Writes and reads logs of runs, which are kept in the store to be shown and compared later.

Each run has two JSON files below the store's root: `runs/<recipe>/<start>-<pid>.json` with its start and
duration, named by the start in microseconds since 1970, and `runs/<recipe>/<digest>.rest` with everything
else, which runs of the same outcome share. <recipe> is a digest of the recipe's absolute path. Only the
newest KEPT logs of each recipe stay. No step depends on a log."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlcbuild_format import regular

from mlcbuild.build.events import Event, Reporter, RunResult, StepFinished, StepPlaced, StepStarted, Warned
from mlcbuild.build.graph import Graph, Step
from mlcbuild.canon import bytes_digest
from mlcbuild.store import layout
from mlcbuild.store.store import Store

FORMAT = "mlcbuild-run/2"
KEPT = layout.KEPT_LOGS
_LARGEST = 256 << 20
"""Maximum size in bytes of a run's log file that is read; a larger one counts as damaged."""
_LAST = 1e11
"""Upper limit, exclusive, for the start of a run in its log, in seconds since 1970, and for its duration in
seconds. A log beyond it counts as damaged; it is before the year 9999, with which dates end."""


@dataclass(frozen=True)
class LoggedStep:
    """One build step in the log of a run: its dependencies, its outcome with the reason, its time and its
    size."""

    name: str
    needs: tuple[str, ...]
    """Names of the steps and sources whose files the step reads."""
    key: str | None
    status: str
    """The outcome of the step: "built", "reused", "failed" or "skipped"."""
    words: str
    """The reason why the step ran, was reused or was skipped, "" if none is stated; for a failed step, its
    error message."""
    start: float | None
    """Seconds from the start of the run to the start of the step; None if it did not run, as when it was
    reused."""
    seconds: float
    bytes: int | None
    """Size of the step's artifact in bytes; None if it has none."""
    tail: str = ""
    """The end of the log of a failed step; "" for other steps."""
    worker: str = ""
    """The cluster machine that ran the step; "" for this machine."""


@dataclass(frozen=True)
class LoggedVariant:
    """The outcome of one variant (a model, a quantization and a target) in the log of a run."""

    name: str
    model: str
    quantization: str
    target: str
    status: str
    words: str
    """The error with which a step of the variant failed or its bundle could not be written, or the reason why
    a finished bundle was not verified; "" if there is neither."""
    line: int
    column: int
    """Column, counted from 1, at which the source of the variant's model stands in the recipe's file, for
    messages that point there."""
    bytes: int | None
    """Size of all files of the variant's bundle in bytes; None if the step that builds it has no result."""
    weights: int | None
    """Size of the variant's weights in bytes; None if the step that writes them has no result."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Name of a figure -> its value, from the comparison of the bundle with the model (kl_mean in nats,
    top1_agreement from 0 to 1, perplexity ...) and from a measurement of speed (speed_decode_8 ... in tokens
    per second); {} if there was neither."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """The content of budget.json, which the step that chose a scheme for each matrix under the variant's
    budget wrote: kind and limit of the budget, scheme, bytes, bits per weight and KL divergence of the whole
    model, the curve of loss over bytes, and the matrices with their schemes. {} for a variant without a
    budget, or if that step has no result here."""


@dataclass(frozen=True)
class RunLog:
    """The log of one run: its steps and variants with their results, and its times."""

    recipe: str
    """Name of the recipe that was run."""
    path: str
    """Path of the recipe, as the command line stated it."""
    time: float
    """Start of the run, in seconds since 1970."""
    seconds: float
    machine: str
    steps: tuple[LoggedStep, ...]
    variants: tuple[LoggedVariant, ...]
    interrupted: str = ""
    shard: str = ""
    """The shard (one machine's share of the build), such as "1/3"; "" for a run without shards."""

    def count(self, status: str) -> int:
        return sum(step.status == status for step in self.steps)


class Clock:
    """Records, from the events of a run, when each step starts (in seconds since the run's start), the last
    lines of each failed step's log ("" for other steps that ended), and whether there was a warning. Passes
    every event on to the receiver `report`."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self.time = time.time()
        self._begun = time.monotonic()
        self.starts: dict[str, float] = {}
        self.tails: dict[str, str] = {}
        self.warned = False

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted() | StepPlaced():
                self.starts[event.name] = time.monotonic() - self._begun
            case StepFinished():
                self.tails[event.result.name] = event.tail
            case Warned():
                self.warned = True
            case _:
                pass
        self._report(event)

    def seconds(self) -> float:
        return time.monotonic() - self._begun


def steps(graph: Graph, result: RunResult, clock: Clock) -> tuple[LoggedStep, ...]:
    """Returns the entries for a run's log, one LoggedStep for each step of `result`, each after the steps on
    which it depends. clock: has received the run's events, and supplies starts and ends of logs."""
    place = {name: index for index, name in enumerate(graph.nodes)}
    logged = []
    for step in sorted(result.steps, key=lambda step: place[step.name]):
        node = graph[step.name]
        logged.append(
            LoggedStep(
                step.name,
                tuple(graph.needs(node)) if isinstance(node, Step) else (),
                step.key,
                step.status,
                str(step.error) if step.error is not None else step.reason,
                clock.starts.get(step.name) if step.status in ("built", "failed") else None,
                step.seconds,
                step.record.size if step.record is not None else None,
                clock.tails.get(step.name, ""),
                step.worker,
            )
        )
    return tuple(logged)


def speeds(log: RunLog) -> dict[str, str]:
    """Returns name of a speed that was measured for any variant of a run -> the speed's name in words, for
    example "speed_decode_8" (decoding with batch size 8) -> "decode 8"."""
    names = dict.fromkeys(name for item in log.variants for name in item.figures)
    return {name: words.replace("_", " ") for name in names if (words := name.removeprefix("speed_")) != name}


def machine() -> str:
    return f"{platform.node()} ({platform.system()} {platform.machine()}, {os.cpu_count()} cores)"


def save(store: Store, recipe: Path, log: RunLog) -> None:
    """Writes the log of a run to the store, and removes all but the newest KEPT logs of the recipe, and the
    .rest files that no log names any more. Errors with files are ignored, since no step depends on a log."""
    # The last three come from damaged older logs.
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        kept_path, rest = keep_rest(store, recipe, log)
        directory = kept_path.parent
        layout.write_log(str(directory), log.time, log.seconds, rest)
        named = {_parse(_read(path)).get("rest") for path in directory.glob("*.json")}
        for path in directory.glob("*.rest"):
            if path.stem not in named:
                path.unlink()


def keep_rest(store: Store, recipe: Path, log: RunLog) -> tuple[Path, str]:
    """Writes the part of a run's log without the run's start and duration to a file, named by its digest,
    unless it exists: runs with the same outcome share it. Returns (path of the file, the end of the JSON text
    of the run's other log file). That text consists of the fields "format" and "rest" (the shared file's name
    without suffix) and the closing brace. Raises OSError if the file cannot be written."""
    fields = {key: value for key, value in vars(log).items() if key not in ("time", "seconds")}
    fields |= {"steps": [vars(step) for step in log.steps], "variants": [vars(item) for item in log.variants]}
    text = json.dumps(fields)  # The text is ASCII, because a path may hold bytes that are not UTF-8.
    name = bytes_digest(text.encode())
    directory = _directory(store, recipe)
    layout.own_directory(str(directory.parent))
    layout.own_directory(str(directory))
    if not os.path.lexists(directory / f"{name}.rest"):
        layout.write(f"{directory}/{name}.rest", [text.encode()])
    return directory / f"{name}.rest", f'"format": {json.dumps(FORMAT)}, "rest": "{name}"}}'


def latest(store: Store, recipe: Path, count: int = KEPT) -> list[RunLog]:
    """Reads the logs of a recipe's last runs, at most `count`, and returns them, the newest first. Unreadable
    and damaged ones are left out and do not count; [] if there is none.
    """
    logs: list[RunLog] = []
    for path in sorted(_directory(store, recipe).glob("*.json"), reverse=True):
        if len(logs) == count:
            break
        with suppress(OSError, ValueError, TypeError, KeyError):
            head = _parse(_read(path))
            name = head.pop("rest")
            rest = _read(path.with_name(f"{name}.rest"))
            if bytes_digest(rest) == name:
                logs.append(_from_json(head, _parse(rest)))
    return logs


def _read(path: Path) -> bytes:
    return regular.read(path, _LARGEST, follow_link=False)


def _parse(data: bytes) -> dict[str, Any]:
    """Parses bytes as a JSON object. Raises ValueError for any other bytes."""
    try:
        document = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _directory(store: Store, recipe: Path) -> Path:
    # One recipe may be named by several paths, such as recipe.yaml and ../project/recipe.yaml.
    return store.root / "runs" / bytes_digest(os.fsencode(os.path.normpath(recipe.absolute())))[:16]


def _from_json(head: dict[str, Any], data: dict[str, Any]) -> RunLog:
    """Converts the two JSON objects that make up a run's log into a `RunLog`. head: the object with the
    format and the run's start and duration; data: all other fields, from a file whose digest was checked, of
    which "steps" and "variants" are removed in place. Raises ValueError for another format, or a start or
    duration that is impossible; KeyError or TypeError if fields are missing, unknown or of a wrong type."""
    if head["format"] != FORMAT:
        raise ValueError("a log of another format")
    begun, seconds = float(head["time"]), float(head["seconds"])
    if not (0 <= begun < _LAST and 0 <= seconds < _LAST):
        raise ValueError("an impossible time")
    rows: Iterable[dict[str, Any]] = data.pop("steps")
    variants: Iterable[dict[str, Any]] = data.pop("variants")
    logged_steps = tuple(LoggedStep(**{**row, "needs": tuple(row["needs"])}) for row in rows)
    return RunLog(
        **data,
        time=begun,
        seconds=seconds,
        steps=logged_steps,
        variants=tuple(LoggedVariant(**row) for row in variants),
    )
