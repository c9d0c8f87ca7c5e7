"""Evaluates a bundle in a separate process in which, as in a server, nothing of the compiler is loaded, and
returns the result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlcbuild import child_progress
from mlcbuild.errors import VerificationError


def run(module: str, *arguments: str) -> Any:
    """Runs a module as a program in a new process, and returns the JSON value that it computes. module: its
    dotted name; the module passes a function to `main` of this file. arguments: strings passed to that
    function.

    The output of the process goes to this process's standard output, which is a step's log, and its progress
    is reported as this process's own. Raises VerificationError if it fails, with the last line that it wrote
    to standard error, or the signal that ended it.
    """
    with TemporaryDirectory() as directory:
        result, errors = Path(directory, "result.json"), Path(directory, "stderr")
        command = [sys.executable, "-m", module, *arguments, str(result)]
        with errors.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
            code = child_progress.wait(process, _progress(result))
        if code == 0:
            return json.loads(result.read_bytes())
        lines = errors.read_text(errors="replace").strip().splitlines()
    if code < 0:
        why = f"the process was ended by {signal.Signals(-code).name}"
    else:
        why = (lines or [f"exit code {code}, no reason given"])[-1]
    raise VerificationError(f"the bundle could not be run: {why}")


def _progress(result: Path) -> Path:
    """Returns the path of the file in which a child process writes its progress. result: path of the file
    for its result.
    """
    return result.with_suffix(".progress")


def main(work: Callable[..., object]) -> None:
    """Calls `work(*arguments)` with the command-line arguments of this child process, except for the last, as
    strings, and writes the result as JSON to the file that the last one names, which `run` in the parent
    process reads. A ServingError ends this process with code 1 and its message on standard error."""
    from mlcbuild_format.errors import ServingError

    *arguments, result = sys.argv[1:]
    child_progress.write_to(_progress(Path(result)))
    try:
        document = work(*arguments)
    except ServingError as error:
        sys.exit(str(error))
    Path(result).write_text(json.dumps(document), encoding="utf-8")
