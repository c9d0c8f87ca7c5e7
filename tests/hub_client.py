"""Runs mlcbuild's functions for hubs in a separate process, because huggingface_hub reads its environment
variables when it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class RefusedError(Exception):
    """An error that a function raised in the separate process of the hub client, raised again in the test's
    process. kind: name of the original error's class; message: its text."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Client:
    """A process with separate environment variables for the hub, which calls functions of this file by
    name."""

    def __init__(self, home: Path, endpoint: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        kept |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint}
        kept |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"} | environment
        kept |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
            text=True,
        )

    def start(self, function: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()

    def call(self, function: str, *arguments: object) -> object:
        """Calls a function in the client's process and returns its result. Raises RefusedError if the
        function raised an exception."""
        self.start(function, *arguments)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client's process has died"
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"], answer["message"])
        return answer["result"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(120)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def do_fetch(repo: str, commit: str, files: dict[str, object], out: str) -> list[str]:
    """Runs the action `fetch` as a worker process would, and returns the files that it wrote."""
    from mlcbuild import progress
    from mlcbuild.checkpoints.fetch import fetch

    observed: list[tuple[int, int]] = []
    progress.listen(lambda done, total, unit: observed.append((done, total)))
    fetch({"repo": repo, "commit": commit, "files": files}, {}, Path(out))  # type: ignore[dict-item]
    assert all(0 <= done <= total for done, total in observed)
    assert observed[-1][0] == observed[-1][1], "progress ends at the whole"
    return sorted(path.relative_to(out).as_posix() for path in Path(out).rglob("*") if path.is_file())


def do_lock(sources: list[str], keep: str | None = None) -> str:
    from mlcbuild.checkpoints import lock
    from mlcbuild.checkpoints.hub import HubSource, parse_source

    parsed = [parse_source(source) for source in sources]
    results = [source for source in parsed if isinstance(source, HubSource)]
    return lock.text(lock.resolve(results, lock.read(Path(keep)) if keep else None))


def do_moved(path: str) -> dict[str, str]:
    from mlcbuild.checkpoints import lock

    return {str(source): commit for source, commit in lock.moved(lock.read(Path(path))).items()}


def do_imported() -> bool:
    importlib.import_module("mlcbuild.checkpoints.fetch")
    importlib.import_module("mlcbuild.checkpoints.lock")
    return "huggingface_hub" in sys.modules


CALLS: dict[str, Callable[..., object]] = {
    "fetch": do_fetch,
    "lock": do_lock,
    "moved": do_moved,
    "imported": do_imported,
}


def _serve_calls() -> None:
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answer: dict[str, object] = {"result": CALLS[function](*arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve_calls()
