"""Writes annotations that GitHub Actions shows beside a problem's position in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from mlcbuild.errors import Problem, one_line


def annotate(problems: Iterable[Problem]) -> None:
    """Prints the problems of a file as annotations for GitHub Actions, to standard error, because standard
    output may be a JSON document. Outside of GitHub Actions it prints nothing."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    workspace = os.environ.get("GITHUB_WORKSPACE")
    for problem in problems:
        print(annotation(problem, Path(workspace) if workspace else None), file=sys.stderr)


def annotation(problem: Problem, workspace: Path | None = None) -> str:
    """Returns the line of text with which GitHub Actions shows `problem`, an error in a file, beside its
    place in the file. workspace: root of the repository, to which the printed path is relative if the file is
    below it; None: the printed path is absolute. An example is "::error
    file=recipe.yaml,line=3,col=7::message"; a problem without a line has no position.
    """
    path = Path(problem.file).absolute()
    if workspace is not None and path.is_relative_to(workspace.absolute()):
        path = path.relative_to(workspace.absolute())
    parts = [f"file={_property(str(path))}"]
    if problem.line:
        parts += [f"line={problem.line}", f"col={problem.column}"]
    return f"::error {','.join(parts)}::{_escaped(problem.message)}"


def _escaped(text: str) -> str:
    return "%0A".join(one_line(line) for line in text.replace("%", "%25").split("\n"))


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
