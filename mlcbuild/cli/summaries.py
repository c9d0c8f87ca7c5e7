"""What `run` leaves behind besides bundles: the log of the run, JUnit, a summary, annotations."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcbuild.build.events import RunResult, StepResult
from mlcbuild.cli.annotations import annotate
from mlcbuild.errors import Problem, StoreError, UsageError
from mlcbuild.pipeline import Pipeline, Product
from mlcbuild.reports import runlog
from mlcbuild.reports.runlog import Clock, LoggedVariant, RunLog
from mlcbuild.store.store import Store

Row = tuple[Product, str, str]
"""A variant, its status, and the message of its failure or a note."""


def make_log(
    pipeline: Pipeline, store: Store, result: RunResult, clock: Clock, rows: Sequence[Row]
) -> RunLog:
    steps = {step.name: step for step in result.steps}
    return RunLog(
        pipeline.recipe.name,
        str(pipeline.recipe.path),
        clock.time,
        clock.seconds(),
        runlog.machine(),
        runlog.steps(pipeline.graph, result, clock),
        tuple(_variant(pipeline, store, steps, row) for row in rows),
        result.interrupted,
    )


def _variant(pipeline: Pipeline, store: Store, steps: Mapping[str, StepResult], row: Row) -> LoggedVariant:
    product, status, words = row
    variant, place = product.variant, product.variant.model.place

    def made(name: str | None) -> StepResult | None:
        found = steps.get(pipeline.graph.resolve(name)) if name is not None else None
        return found if found is not None and found.record is not None else None

    bundle, verified = made(product.bundle), made(product.verify)
    weights = made(next((name for name in product.steps if name.startswith("weights/")), None))
    failed = [step.error for name in product.steps if (step := steps.get(name)) and step.error is not None]
    return LoggedVariant(
        variant.name,
        variant.model.name,
        variant.quantization,
        variant.target.name,
        status,
        str(failed[0]) if failed else words,
        place.line,
        place.column,
        bundle.record.size if bundle is not None and bundle.record is not None else None,
        weights.record.size if weights is not None and weights.record is not None else None,
        _figures(store, verified) | _speed(store, made(product.bench)),
    )


def _figures(store: Store, verified: StepResult | None) -> dict[str, float]:
    if verified is None or verified.record is None:
        return {}
    entries = {entry.path: entry for entry in verified.record.files}
    try:
        manifest = json.loads(store.read_blob(entries["bundle.json"]))
    except StoreError:  # its record came from a remote, and its files were not needed here; or it is damaged
        return {}
    return {
        name: value
        for name, value in (manifest["verification"] or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _speed(store: Store, measured: StepResult | None) -> dict[str, float]:
    """Tokens per second: speed_prefill, speed_decode_1 and speed_decode_<largest batch>."""
    if measured is None or measured.record is None:
        return {}
    (entry,) = measured.record.files
    try:
        found = json.loads(store.read_blob(entry))
    except StoreError:
        return {}
    return {
        f"speed_{name.replace(' ', '_')}": figure["tokens_per_second"]
        for name, figure in found.items()
        if isinstance(figure, dict)
    }


def speeds(log: RunLog) -> list[str]:
    """A line for each variant whose speed is known: "speed   tiny-q4-host  prefill: 900 tok/s, ..."."""
    names = runlog.speeds(log)
    lines = []
    for item in log.variants:
        parts = [f"{names[name]}: {value:.0f} tok/s" for name, value in item.figures.items() if name in names]
        lines += [f"speed   {item.name}  {', '.join(parts)}"] if parts else []
    return lines


def tell(arguments: argparse.Namespace, log: RunLog) -> None:
    """Writes what was asked for and what the CI system around this process understands."""
    from mlcbuild.ci.outputs import junit, markdown

    if arguments.junit is not None:
        _write(arguments.junit, junit(log))
    summary = markdown(log)
    if arguments.summary is not None:
        _write(arguments.summary, summary)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        _write(page, summary + "\n", append=True)
    failed = [item for item in log.variants if item.status == "failed"]
    annotate(
        Problem(log.path, item.line, item.column, f"variant '{item.name}' failed: {item.words}")
        for item in failed
    )


def check_writable(arguments: argparse.Namespace) -> None:
    """Raises UsageError for an output that cannot be written, before hours of work and not after."""
    for path in (arguments.junit, arguments.summary):
        if path is not None:
            _write(path, "", append=True)


def _write(path: str, text: str, append: bool = False) -> None:
    try:
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
