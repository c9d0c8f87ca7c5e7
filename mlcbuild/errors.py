"""The errors that mlcbuild raises on purpose. The runtime has its own: ServingError, in
mlcbuild_format.errors.

    MlcbuildError                 exit code 1
    ├── UsageError                exit code 2   the command line or a file the user wrote is wrong
    │   └── InputError            exit code 2   problems in a file, each with its place
    ├── StepError                 exit code 1   a step's work failed
    │   ├── CheckpointError       exit code 1   a checkpoint's config or tensors do not fit
    │   ├── SourceError           exit code 1   a source could not be fetched, or is not what was pinned
    │   ├── CompileError          exit code 1   a library could not be built
    │   └── VerificationError     exit code 1   a bundle's answers differ too much from its model's
    ├── ProvenanceError           exit code 1   a bundle lacks a valid provenance statement
    ├── StoreError                exit code 1   a store is damaged or cannot be written
    │   └── LostBlobError         exit code 1   a file of a store is missing, or was damaged and removed
    ├── RemoteError               exit code 1   a shared cache cannot be used, or holds what it must not
    ├── PublishError              exit code 1   a bundle could not be published or downloaded
    └── SetupError                exit code 3   this machine lacks something: the message says what to install

Errors for one purpose, such as UnreachableError of SourceError, stand beside the code that raises them. A
message is complete by itself: where, which rule, what was found, what to do. The command line prints it, and
that of a ServingError, without a traceback. Any other exception that escapes is reported as a defect of
mlcbuild, unless a disk is full or a path cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import ClassVar, Self


class MlcbuildError(Exception):
    """Base class of all errors that mlcbuild raises on purpose. `exit_code` is the exit code of the command
    line, 1 unless a subclass sets another."""

    exit_code: ClassVar[int] = 1


class UsageError(MlcbuildError):
    exit_code = 2


@dataclass(frozen=True, order=True)
class Problem:
    """A problem in a file that a user wrote. `line` and `column` count from 1; 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return one_line(shortened(f"{place}: {self.message}"))


class InputError(UsageError):
    """The error for a file with problems. They are sorted by position in the file, without duplicates; the
    error's message has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


MOST_PROBLEMS = 1000
"""Maximum number of problems that are listed for one file (1000). A file with more was written by a program,
and one mistake explains most of them."""


class Problems(list[Problem]):
    """The problems of one file, collected in a list. Adding more than MOST_PROBLEMS (1000) raises InputError,
    which lists those so far and one about their number."""

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        super().__init__()
        self.extend(problems)

    def append(self, problem: Problem) -> None:
        if len(self) >= MOST_PROBLEMS:
            message = f"it has more than {MOST_PROBLEMS} problems; correct these, and check it again"
            raise InputError([Problem(problem.file, 0, 0, message), *self])
        super().append(problem)

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.append(problem)

    def __iadd__(self, problems: Iterable[Problem]) -> Self:  # type: ignore[misc,override]  # `+` gives a list
        self.extend(problems)
        return self


class StepError(MlcbuildError):
    pass


class CheckpointError(StepError):
    def __init__(self, message: object) -> None:
        """Creates the error for a checkpoint. message: one problem per line; "..." replaces the middle of
        lines of more than 2000 characters, since they quote names and values of the checkpoint's files."""
        super().__init__("\n".join(map(shortened, str(message).split("\n"))))


class SourceError(StepError):
    pass


class CompileError(StepError):
    pass


class VerificationError(StepError):
    figures: Mapping[str, float] = MappingProxyType({})
    """Measurements of the verification that failed with this error: name of a figure, such as "kl_mean" ->
    value. Empty if the bundle could not be run, or if another machine of a cluster verified it."""


class ProvenanceError(MlcbuildError):
    pass


class StoreError(MlcbuildError):
    pass


class LostBlobError(StoreError):
    """The error for a file of a store that is missing, or was removed because its bytes were wrong. When the
    build is planned again, the step that wrote the file runs again."""


class RemoteError(MlcbuildError):
    pass


class PublishError(MlcbuildError):
    pass


class SetupError(MlcbuildError):
    exit_code = 3


_LISTED = 30
"""Maximum number of valid names that an error message lists (30), enough for all target presets and
quantization schemes."""
_COMPARED = 500
"""Maximum number of valid names with which an unknown name is compared to suggest a similar one, which takes
up to 2 ms.
"""
_LONGEST = 100
"""Maximum number of characters of a name (100) for which similar names are searched, since that time grows
with the square of the length."""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name `word`: "did you mean 'a'?" with the most
    similar valid name or, if none is similar, "known: a, b and 3 more", with the first 30 valid names in
    alphabetical order, each cut after 100 characters, and the number of the others; "none is defined" if
    there are no names."""
    names = sorted(valid)
    if (closest := closest_name(word, names)) is not None:
        return f"did you mean '{closest}'?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_LISTED])
    return f"known: {listed}{more}" if names else "none is defined"


def closest_name(word: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name of which `word` is most likely a misspelling; None if it resembles none, or has
    more than 100 characters."""
    return max(close_names(word, sorted(valid)), key=lambda name: _likeness(word, name), default=None)


def close_names(word: str, valid: Iterable[str]) -> list[str]:
    """Returns up to 10 valid names of which `word` may be a misspelling, the most similar first. Names of 100
    characters and more are not compared; if more than 500 are left, only the first 500 with the first letter
    of `word` are. If `word` is longer than 100 characters, the list is empty."""
    names = [name for name in valid if abs(len(name) - len(word)) < _LONGEST > len(name)]
    if len(word) > _LONGEST:
        return []
    if len(names) > _COMPARED:
        names = [name for name in names if name[:1] == word[:1]][:_COMPARED]
    return get_close_matches(word, names, n=10, cutoff=0.6)


LONGEST_MESSAGE = 2000
"""Maximum number of characters (2000) of one problem in an error message, its place included; the middle of a
longer one is left out."""


def shortened(text: str) -> str:
    """Returns an error message; if it is longer than LONGEST_MESSAGE (2000) characters, "..." replaces its
    middle, which quotes input. The place stands at the beginning, and the remedy at the end."""
    part = LONGEST_MESSAGE // 2 - 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:part]}...{text[-part:]}"


def one_line(text: str) -> str:
    """Returns a text as one line: every character that is not printable, such as a newline, is written as an
    escape sequence of Python, such as \\n. Backslashes stay as they are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe_lines(text: str) -> str:
    """Returns a text in which the characters that are not printable are written as escape sequences of
    Python, since printed text may quote untrusted input. Line feeds stay, but not other line breaks such as
    carriage returns; tabs become spaces, up to the next multiple of 8 columns."""
    return text if text.isprintable() else "\n".join(map(one_line, text.expandtabs().split("\n")))


def _likeness(one: str, other: str) -> float:
    """Returns the similarity of two texts, 0 to 1: the larger of SequenceMatcher's ratios for (one, other)
    and (other, one).

    Among equally long matches SequenceMatcher prefers the first in its first text, so swapped letters are
    recognised in one direction only.
    """
    return max(SequenceMatcher(None, *pair).ratio() for pair in ((one, other), (other, one)))
