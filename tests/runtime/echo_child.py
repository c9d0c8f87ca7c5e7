"""A child process for tests of its parent. Each line of its input is a JSON document; depending on it, the
process answers with a line, answers with a long one, starts another process, ends with an exit code, or never
answers."""

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
