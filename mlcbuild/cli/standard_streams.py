"""The standard streams of a command, which its caller may have closed, or may close at any time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from logging import ERROR
from pathlib import Path

from mlcbuild.errors import safe_lines


def open_closed() -> None:
    """Replaces stdout and stderr, if the caller has closed them, by streams that discard their output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It must stay open until the interpreter ends.
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)


def flushed() -> bool:
    """Flushes standard output. Returns True if that succeeds, or if it is a pipe that its reader has closed;
    otherwise prints an error message to stderr and returns False. Unless the flush succeeds, all further
    standard output is discarded."""
    try:
        sys.stdout.flush()
    except OSError as error:
        silence()
        if not isinstance(error, BrokenPipeError):
            print(f"mlcbuild: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return isinstance(error, BrokenPipeError)
    return True


def silence() -> None:
    """Discards all further standard output of this process, even output that the interpreter writes when it
    ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_error(message: str, arguments: Sequence[str]) -> None:
    """Prints an error message on standard error, with unprintable characters escaped. arguments: the words of
    the command line after the program's name; if they run `serve` with a JSON log, the message is printed as
    a JSON object."""
    # A message quotes files and servers, whose escape sequences must not reach the terminal.
    line = safe_lines(message)
    if arguments[:1] == ["serve"]:
        from mlcbuild_runtime.http import logs

        line = logs.event_line(message, "json", ERROR) if logs.asks_for_json(arguments) else line
    print(line, file=sys.stderr)


def usage_errors(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Returns a context in which the command line is parsed. arguments: its words after the program's name;
    if they run `serve` with a JSON log, argparse's error message is printed as a JSON object."""
    if arguments[:1] != ["serve"]:
        return nullcontext()
    from mlcbuild_runtime.http.logs import usage_errors as as_json

    return as_json(arguments)
