"""A child process for tests, which answers a line, ends, or never answers, as the line requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def work() -> None:
    for line in sys.stdin:
        match json.loads(line):
            case {"end": int(code)}:
                os._exit(code)
            case {"hang": True}:
                time.sleep(3600)
            case {"fork": True}:
                process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
                answer(json.dumps([os.getpid(), process.pid]))
            case {"large": int(count)}:
                answer(json.dumps("x" * count))
            case document:
                answer(json.dumps({"pid": os.getpid(), "document": document}))
