"""Prints the arguments, environment, directory and standard streams of this process as one line of JSON, so
that a test can compare processes. It then ends as its first argument states: "kill" by SIGKILL, "sleep" after
ten minutes, "error" with a KeyError; a number is its exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STATE = {
    "arguments": sys.argv[1:],
    "cwd": str(Path.cwd()),
    "environment": dict(os.environ),
    "path": sys.path,
    "name": __name__,
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "terminals": [os.isatty(descriptor) for descriptor in range(3)],
    "input": sys.stdin.read(),
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(STATE, sort_keys=True) + "\n")
    how = sys.argv[1]
    if how == "kill":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        sys.stdout.flush()
        time.sleep(600)
    if how == "error":
        raise KeyError(how)
    sys.exit(int(how))
