"""Holds what the modules that read a recipe's sections share: data, the line and column of each value, the
project directory that paths must not leave, and problems."""

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
"""Maximum length in bytes of one component of a path in a recipe. Filesystems allow 255, and files beside an
output have longer names."""
LONGEST_PATH = 3840
"""Maximum length in bytes of the absolute path of a file or output directory in a recipe. Systems allow 4095,
and files within an output directory have longer paths."""


@dataclass(frozen=True)
class Reading:
    """A recipe while it is being read, with the problems that were detected so far.

    Values that the JSON schema rejects count as absent, so that all other checks can run without reporting
    them again.
    """

    document: Document
    directory: Path
    """Absolute path of the recipe's directory, to which paths in the recipe are relative."""
    project: Path
    """The directory of the recipe's project, with symbolic links resolved: the root of the Git checkout that
    contains the recipe, or the recipe's directory if there is none. Paths in the recipe must not leave it
    unless the user has allowed that."""
    allow_outside: bool
    bad: frozenset[Where]
    """Paths of the values in a recipe that the JSON schema rejected. `get` returns None for these paths."""
    bad_keys: frozenset[Where]
    """Paths (keys and indices from the top) of the mapping entries in a recipe whose keys the JSON schema
    rejected, such as names with invalid characters."""
    origins: Mapping[Where, str]
    problems: Problems

    def report(self, where: Where, message: str, on_key: bool = False) -> None:
        """Adds a problem of the recipe; if the value contained references to variables, its message ends with
        the text before substitution. Raises InputError, with the problems so far, if there are more than
        1000. where: path (keys and indices) of the value concerned; message: text of the problem; on_key:
        True if the problem is at the value's key, which has no such text."""
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
        """Returns the absolute path for a path in the recipe, symbolic links not resolved; None, with a
        problem added, if it is invalid (begins with "~", has a backslash, an invisible character, a name or a
        length beyond the limits, or a loop of links), or leaves the project although the user has not allowed
        that. where: keys and indices that lead to `text` in the recipe."""
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
        """Returns the end of an error message if a filesystem may be unable to hold the path `text`, relative
        to the recipe's directory, such as one with a name that is too long, a backslash or an invisible
        character; None if every supported one can hold it."""
        if not text.isprintable():
            return "holds an invisible character; a path has visible letters and spaces only"
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
    """Returns the root of the Git checkout that contains `directory`, or `directory` itself if it is in none;
    absolute in both cases, with symbolic links resolved."""
    real = directory.resolve()
    for candidate in (real, *real.parents):
        if kind(candidate / ".git") != "missing":
            return candidate
    return real


def resolved(path: Path) -> Path | None:
    """Returns `path`, which need not exist, as an absolute path with symbolic links resolved; None if they
    form a loop or the system rejects the path."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


def loops(path: Path) -> bool:
    """Returns True if symbolic links in a path form a loop; False for any other path, existing or not."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def kind(path: Path) -> str:
    """Returns the kind of a file, or of a link's target, in words, such as "a regular file" or "a directory";
    "missing" if it does not exist or cannot be examined."""
    try:
        return regular.kind(path)
    except OSError:
        return "missing"
