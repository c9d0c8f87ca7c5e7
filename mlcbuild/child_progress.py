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
    """Makes this process write its progress reports, "done total unit", to the file `note`, which its parent
    process reads."""

    def write(done: int, total: int, unit: str) -> None:
        note.write_text(f"{done} {total} {unit}")

    progress.listen(write)


def wait(process: subprocess.Popen[bytes], note: Path, seconds: float = float("inf")) -> int:
    """Waits for a child process, reports the progress that it writes to the file `note`, and returns its exit
    code. Kills it and raises subprocess.TimeoutExpired if it takes longer than `seconds`."""
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
                done, total, unit = note.read_text().split()
                progress.report(int(done), int(total), unit)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return code
