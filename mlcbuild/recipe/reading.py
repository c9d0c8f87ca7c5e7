"""What the readers of a recipe's sections share: the data, the places, the project, the problems."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlcbuild_format import regular

from mlcbuild.documents.document import Data, Document, Where
from mlcbuild.errors import Problems

LONGEST_NAME = 240
"""Bytes of one part of a path: file systems take 255, and files beside an output have longer names."""
LONGEST_PATH = 3840
"""Bytes of a whole path: systems take 4095, and an output holds files."""


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
    problems: Problems

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
        """A path of the recipe, absolute; None, with a problem, where it cannot be or leaves the project."""
        path = self.directory / text
        if text.startswith("~"):
            message = f"'{text}': '~' does not stand for a home directory here; write the path out"
        elif fault := self.unwritable(text):
            message = f"'{text}' {fault}"
        elif loops(path):
            message = f"'{text}' leads nowhere: symbolic links on the way form a loop; correct them"
        elif self.allow_outside or ((real := resolved(path)) and real.is_relative_to(self.project)):
            return path
        else:
            message = f"'{text}' leaves the project {self.project}; allow it with --allow-outside"
        self.report(where, message)
        return None

    def unwritable(self, text: str) -> str | None:
        """Why no file system of a supported machine has such a path; None when it may."""
        if not text.isprintable():
            return "holds a character that cannot be seen; a path has visible letters and spaces only"
        if "\\" in text:
            return "holds a '\\': write '/' between the parts of a path"
        name = max(text.split("/"), key=lambda part: len(part.encode()))
        if len(name.encode()) > LONGEST_NAME:
            shown = f"{name[:40]}..."
            return f"has the part '{shown}' of {len(name.encode())} bytes; at most {LONGEST_NAME} are allowed"
        size = len(os.fsencode(self.directory)) + 1 + len(text.encode())
        if size > LONGEST_PATH:
            return f"is {size} bytes long below {self.directory}; at most {LONGEST_PATH} are allowed"
        return None


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


def loops(path: Path) -> bool:
    """Whether symbolic links on the way to a path form a loop."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def kind(path: Path) -> str:
    """What is there, in words: "a regular file", "a directory" ... What cannot be looked at is "missing"."""
    try:
        return regular.kind(path)
    except OSError:
        return "missing"
