"""Runs a bundle in a separate process in which, as in a server, nothing of the compiler is loaded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlcbuild.errors import VerificationError


def run(module: str, *arguments: str) -> Any:
    """Runs `main` of a module with these arguments in a new process, and returns its result.

    The output of the process goes to this process's standard output, which is a step's log. Raises
    VerificationError with the last line that the process wrote to standard error.
    """
    with TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        command = [sys.executable, "-m", module, *arguments, str(result)]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            return json.loads(result.read_bytes())
    if done.returncode < 0:
        why = f"the process was ended by {signal.Signals(-done.returncode).name}"
    else:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}, no reason given"])[-1]
    raise VerificationError(f"the bundle could not be run: {why}")


def main(work: Callable[..., object]) -> None:
    """Runs in the new process: calls `work` with the process's arguments, and writes the result for `run` to
    read.
    """
    from mlcbuild_format.errors import ServingError

    *arguments, result = sys.argv[1:]
    try:
        document = work(*arguments)
    except ServingError as error:
        sys.exit(str(error))
    Path(result).write_text(json.dumps(document), encoding="utf-8")
