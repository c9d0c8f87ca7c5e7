"""The standard streams of a command, which its caller may have closed, or may close at any time."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def open_closed() -> None:
    """Replaces standard streams that the caller has closed by streams that discard their output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It must stay open until the interpreter ends.
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)


def flushed() -> bool:
    """Flushes standard output. Prints an error message and returns False if it cannot be written; a pipe
    that its reader has closed is no error.
    """
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
