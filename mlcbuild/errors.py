"""Every error that mlcbuild raises on purpose.

    MlcbuildError                 exit code 1
    ├── UsageError                exit code 2   the command line or a file the user wrote is wrong
    │   └── InputError            exit code 2   problems in a file, each with its place
    ├── StepError                 exit code 1   a step's work failed
    │   ├── CheckpointError       exit code 1   a checkpoint's config or tensors do not fit
    │   ├── SourceError           exit code 1   a source could not be fetched, or is not what was pinned
    │   ├── CompileError          exit code 1   a library could not be built
    │   └── VerificationError     exit code 1   a bundle answers too differently from its model
    ├── ProvenanceError           exit code 1   nobody vouches for a bundle, or for another than this
    ├── StoreError                exit code 1   a store is damaged or cannot be written
    ├── RemoteError               exit code 1   a shared cache cannot be used, or holds what it must not
    ├── PublishError              exit code 1   a bundle could not be sent somewhere, or fetched from there
    └── SetupError                exit code 3   this machine lacks something: the message says what to install

A message is complete by itself: where, which rule, what was found, what to do. The command line prints
it without a traceback. Anything else that escapes is a defect of mlcbuild and is reported as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import ClassVar


class MlcbuildError(Exception):
    """Base of the tree. `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UsageError(MlcbuildError):
    exit_code = 2


@dataclass(frozen=True, order=True)
class Problem:
    """One finding in a file a user wrote. `line` and `column` count from 1; 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class InputError(UsageError):
    """All problems of one reading, sorted by place; the message is one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class StepError(MlcbuildError):
    pass


class CheckpointError(StepError):
    pass


class SourceError(StepError):
    pass


class CompileError(StepError):
    pass


class VerificationError(StepError):
    pass


class ProvenanceError(MlcbuildError):
    pass


class StoreError(MlcbuildError):
    pass


class RemoteError(MlcbuildError):
    pass


class PublishError(MlcbuildError):
    pass


class SetupError(MlcbuildError):
    exit_code = 3


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: a close name, or the list of known ones."""
    names = sorted(known)
    close = get_close_matches(found, names, n=10, cutoff=0.6)
    if close:
        return f"did you mean '{max(close, key=lambda name: _likeness(found, name))}'?"
    return f"known: {', '.join(names)}" if names else "none is defined"


def _likeness(one: str, other: str) -> float:
    """0 to 1. A matcher takes the first of equally long runs of its first text: swapped letters are seen from
    one side only."""
    return max(SequenceMatcher(None, *pair).ratio() for pair in ((one, other), (other, one)))
