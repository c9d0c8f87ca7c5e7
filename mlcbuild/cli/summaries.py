"""Writes a run's outputs for CI systems: JUnit XML, a summary, annotations."""

from __future__ import annotations

import argparse
import os

from mlcbuild.cli.annotations import annotate
from mlcbuild.errors import Problem, UsageError
from mlcbuild.reports import runlog
from mlcbuild.reports.runlog import RunLog


def speeds(log: RunLog) -> list[str]:
    """Returns lines such as "speed   tiny-q4  prefill: 900 tok/s, ...", one for each variant with a measured
    speed."""
    names = runlog.speeds(log)
    lines = []
    for item in log.variants:
        parts = [f"{names[name]}: {value:.0f} tok/s" for name, value in item.figures.items() if name in names]
        lines += [f"speed   {item.name}  {', '.join(parts)}"] if parts else []
    return lines


def write(arguments: argparse.Namespace, log: RunLog) -> None:
    """Writes the outputs of a run for CI systems: the files of --junit and --summary, the summary also at the
    end of $GITHUB_STEP_SUMMARY, and in GitHub Actions an annotation for each failed variant, to stderr.
    Raises UsageError if a file cannot be written."""
    from mlcbuild.ci.ci_reports import junit, markdown

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
    """Raises UsageError if an output file of a run (--junit, --summary, $GITHUB_STEP_SUMMARY) cannot be
    written, so that no hours of work are done in vain. A file that does not exist is created."""
    for path in (arguments.junit, arguments.summary, os.environ.get("GITHUB_STEP_SUMMARY") or None):
        if path is not None:
            _write(path, "", append=True)


def _write(path: str, text: str, append: bool = False) -> None:
    try:
        with open(path, "a" if append else "w", encoding="utf-8", opener=_opened) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _opened(path: str, flags: int) -> int:
    """Opens a file as `open` would and returns its descriptor, but raises OSError for a named pipe without a
    reader; `open` would wait for one."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor
