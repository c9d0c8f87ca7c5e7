"""What the readers of a recipe's sections share: the data, the places, the project, the problems."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlcbuild.document import Data, Document, Where
from mlcbuild.errors import Problem


@dataclass(frozen=True)
class Reading:
    """One recipe being read. Values that the schema refuses are absent here, so that every other check can
    still run and says nothing about them."""

    document: Document
    directory: Path
    """Of the recipe, absolute: what paths in it are relative to."""
    project: Path
    """What paths may not leave, with symbolic links resolved."""
    allow_outside: bool
    bad: frozenset[Where]
    """Values that are absent."""
    bad_keys: frozenset[Where]
    """Keys that are not names."""
    origins: Mapping[Where, str]
    problems: list[Problem]

    def report(self, where: Where, message: str, on_key: bool = False) -> None:
        """Add a problem at a value, or at its key."""
        place = self.document.key_place(where) if on_key else self.document.place(where)
        if where in self.origins and not on_key:
            message = f"{message} (from {self.origins[where]})"
        self.problems.append(place.problem(message))

    def get(self, *where: str | int) -> Data:
        return None if where in self.bad else self.document.get(where)

    def text(self, *where: str | int) -> str | None:
        value = self.get(*where)
        return value if isinstance(value, str) else None

    def mapping(self, *where: str | int) -> dict[str, Data]:
        value = self.get(*where)
        return value if isinstance(value, dict) else {}

    def items(self, *where: str | int) -> list[Data]:
        value = self.get(*where)
        return value if isinstance(value, list) else []

    def path(self, where: Where, text: str) -> Path | None:
        """A path of the recipe, absolute; None, with a problem, when it leaves the project."""
        if text.startswith("~"):
            self.report(where, f"'{text}': '~' does not stand for a home directory here; write the path out")
            return None
        path = self.directory / text
        real = resolved(path)
        if not self.allow_outside and not (real and real.is_relative_to(self.project)):
            message = f"'{text}' leaves the project {self.project}; allow it with --allow-outside"
            self.report(where, message)
            return None
        return path


def project_of(directory: Path) -> Path:
    """The nearest directory at or above that a Git checkout starts at; without one the directory itself."""
    real = directory.resolve()
    for candidate in (real, *real.parents):
        if kind(candidate / ".git") != "missing":
            return candidate
    return real


def resolved(path: Path) -> Path | None:
    """The path without symbolic links; None where they form a loop or the system refuses the path."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


def kind(path: Path) -> Literal["directory", "file", "missing"]:
    """What is there. What cannot be looked at counts as missing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "missing"
    return "directory" if stat.S_ISDIR(mode) else "file"
