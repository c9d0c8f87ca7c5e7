"""Passes the progress that a child process reports to the listener of its parent process, through a file."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

from mlcbuild import progress

_PERIOD = 0.2
"""Seconds between two readings of the progress that a child process writes."""


def write_to(note: Path) -> None:
    """Makes this process write each of its progress reports, as the text "done total unit", to the file
    `note`, which its parent process reads. A report replaces the one before."""

    def write(done: int, total: int, unit: str) -> None:
        note.write_text(f"{done} {total} {unit}")

    progress.listen(write)


def wait(process: subprocess.Popen[bytes], note: Path, seconds: float = float("inf")) -> int:
    """Waits for a child process and returns its exit code, which is negative if a signal ended the process.
    Meanwhile passes the progress that the child writes to the file `note` to this process's listener.
    seconds: maximum time to wait, by default without a limit; then raises subprocess.TimeoutExpired. The
    child is killed then, and if anything else interrupts the wait."""
    end = time.monotonic() + seconds
    code = None
    try:
        while code is None:
            try:
                code = process.wait(min(_PERIOD, max(end - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
            with suppress(OSError, ValueError):  # there is no note yet, or it is being written
                done, total, unit = note.read_text().split(" ", 2)  # a unit may be empty or have spaces
                progress.report(int(done), int(total), unit)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return code
