"""What a run did, kept in the store so that it can be shown and compared later.

Two JSON files below the store's root for each run, `runs/<recipe>/<time>.json` and what of it is the same
for runs without work, `runs/<recipe>/<digest>.rest`; the newest KEPT runs stay. It is for people: nothing
that is built depends on it.
"""

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
"""Bytes of a file of a log."""
_LAST = 1e11
"""Seconds since 1970 of a log's time are below it: dates end with the year 9999, not far above."""


@dataclass(frozen=True)
class LoggedStep:
    name: str
    needs: tuple[str, ...]
    """Steps and sources it reads."""
    key: str | None
    status: str
    """built, reused, failed or skipped."""
    words: str
    """Why it ran or was skipped; the message of a failure."""
    start: float | None
    """Seconds from the start of the run; None when it did not run."""
    seconds: float
    bytes: int | None
    """Of its artifact."""
    tail: str = ""
    """The end of a failed step's log."""
    worker: str = ""
    """The machine of a cluster that ran it."""


@dataclass(frozen=True)
class LoggedVariant:
    name: str
    model: str
    quantization: str
    target: str
    status: str
    words: str
    """Why it failed, or why it was not verified."""
    line: int
    column: int
    """Where the recipe gives its model."""
    bytes: int | None
    """Of the bundle's files."""
    weights: int | None
    """Bytes of its weights alone."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What verification found, and the speed where it was measured."""


@dataclass(frozen=True)
class RunLog:
    recipe: str
    """Its name."""
    path: str
    """Of its file, as it was given."""
    time: float
    """Seconds since 1970 at the start."""
    seconds: float
    machine: str
    steps: tuple[LoggedStep, ...]
    variants: tuple[LoggedVariant, ...]
    interrupted: str = ""
    shard: str = ""
    """ "1/3", or "" for a whole run."""

    def count(self, status: str) -> int:
        return sum(step.status == status for step in self.steps)


class Clock:
    """A reporter that notes when steps start, and passes every event on."""

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
    """A run's results with their times, in an order in which each step follows what it needs."""
    place = {name: index for index, name in enumerate(graph.nodes)}
    found = []
    for step in sorted(result.steps, key=lambda step: place[step.name]):
        node = graph[step.name]
        found.append(
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
    return tuple(found)


def speeds(log: RunLog) -> dict[str, str]:
    """The figures of speed that any variant has, with words for them: speed_decode_8 is "decode 8"."""
    names = dict.fromkeys(name for item in log.variants for name in item.figures)
    return {name: words.replace("_", " ") for name in names if (words := name.removeprefix("speed_")) != name}


def machine() -> str:
    return f"{platform.node()} ({platform.system()} {platform.machine()}, {os.cpu_count()} cores)"


def save(store: Store, recipe: Path, log: RunLog) -> None:
    """Keeps a log; a store that cannot be written keeps none, which fails nothing."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # the latter: damaged older logs
        kept, rest = keep_rest(store, recipe, log)
        directory = kept.parent
        layout.write_log(str(directory), log.time, log.seconds, rest)
        named = {_parse(_read(path)).get("rest") for path in directory.glob("*.json")}
        for path in directory.glob("*.rest"):
            if path.stem not in named:
                path.unlink()


def keep_rest(store: Store, recipe: Path, log: RunLog) -> tuple[Path, str]:
    """Writes what a log says besides its times to a file; its path, and the end of a JSON that names it.

    Raises OSError.
    """
    fields = {key: value for key, value in vars(log).items() if key not in ("time", "seconds")}
    fields |= {"steps": [vars(step) for step in log.steps], "variants": [vars(item) for item in log.variants]}
    text = json.dumps(fields)  # ASCII: a path may hold bytes that are no UTF-8
    name = bytes_digest(text.encode())
    directory = _directory(store, recipe)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / f"{name}.rest").exists():
        _write(directory / f"{name}.rest", text)
    return directory / f"{name}.rest", f'"format": {json.dumps(FORMAT)}, "rest": "{name}"}}'


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def latest(store: Store, recipe: Path, count: int = KEPT) -> list[RunLog]:
    """The logs of a recipe's last runs, the newest first. Those that cannot be read are left out."""
    found: list[RunLog] = []
    for path in sorted(_directory(store, recipe).glob("*.json"), reverse=True):
        if len(found) == count:
            break
        with suppress(OSError, ValueError, TypeError, KeyError):
            head = _parse(_read(path))
            name = head.pop("rest")
            rest = _read(path.with_name(f"{name}.rest"))
            if bytes_digest(rest) == name:
                found.append(_from_json(head, _parse(rest)))
    return found


def _read(path: Path) -> bytes:
    return regular.read(path, _LARGEST, follow_link=False)


def _parse(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError."""
    try:
        document = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _directory(store: Store, recipe: Path) -> Path:
    return store.root / "runs" / bytes_digest(os.fsencode(recipe.absolute()))[:16]


def _from_json(head: dict[str, Any], data: dict[str, Any]) -> RunLog:
    """Returns the log of a file with times and one, whose digest was checked, with everything else."""
    if head["format"] != FORMAT:
        raise ValueError("a log of another format")
    begun, seconds = float(head["time"]), float(head["seconds"])
    if not (0 <= begun < _LAST and 0 <= seconds < _LAST):
        raise ValueError("a time that cannot be")
    rows: Iterable[dict[str, Any]] = data.pop("steps")
    variants: Iterable[dict[str, Any]] = data.pop("variants")
    found = tuple(LoggedStep(**{**row, "needs": tuple(row["needs"])}) for row in rows)
    return RunLog(
        **data,
        time=begun,
        seconds=seconds,
        steps=found,
        variants=tuple(LoggedVariant(**row) for row in variants),
    )
