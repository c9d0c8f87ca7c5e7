"""Starts a command by a fork server and ends as it does: `python -IS tests/fork_client.py SOCKET START MODULE
ARGUMENT...`.

Shell scripts of tests call it in place of `python -m MODULE ARGUMENT...`, which takes ten times as long. If
the environment variables that Python reads at its start are others than in START, a JSON object, it starts
Python.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
"""Prefixes of environment variables that Python or the C library reads once, at its start."""


def read_at_start(variables: dict[str, str]) -> dict[str, str]:
    """Returns those environment variables that change how Python starts."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }


def main(address: str, start: str, module: str, *arguments: str) -> int:
    environment = dict(os.environ)
    if read_at_start(environment) != json.loads(start):
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    cwd = os.path.realpath(os.curdir)  # pathlib takes as long to import as all other modules
    request = {"module": module, "arguments": arguments, "cwd": cwd, "environment": environment}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"+"], [1, 2, 0])
        server.sendall(json.dumps({**request, "session": False}).encode() + b"\n")
        with server.makefile("rb") as answers:
            pid = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda received, _: os.kill(pid, received))
            code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:  # it can only have its default effect
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
