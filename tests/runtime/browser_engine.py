"""Calls functions of the browser's engine in Node.js, which runs JavaScript but has no GPU."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from . import shared

NODE = shutil.which("node")
ENGINE = shared.ROOT / "runtime" / "mlcbuild_runtime" / "browser"


GLOBAL = {"clicks", "unloaded"}
"""Names of functions that replace global variables of Node.js, so that no other call may follow."""


class _Node:
    """A Node.js process that calls functions of the browser's engine. It starts with the first call, because
    to start and to import the engine takes 0.4 CPU seconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def calls(self, listed: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        """Calls functions, each (name, arguments). Returns {"value": result} or {"error": message} for each.
        Raises AssertionError if the process ends or has not answered after WAIT seconds."""
        if self._process is None:
            assert NODE is not None
            command = [NODE, str(Path(__file__).with_name("browser_calls.mjs"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(shared.WAIT, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(listed).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
            if GLOBAL.intersection(name for name, _ in listed):
                self.close()
        if not line:
            self.close()
            raise AssertionError(f"Node.js has ended with exit code {process.returncode}, or was killed")
        results: list[dict[str, Any]] = json.loads(line)
        return results

    def close(self) -> None:
        """Ends the process; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()


_NODE = _Node()
atexit.register(_NODE.close)


def calls(*listed: tuple[str, Any]) -> list[dict[str, Any]]:
    """Calls functions of the browser's engine, each (name, arguments), in Node.js. Returns {"value": result}
    or {"error": message} for each. Skips the test if there is no Node.js."""
    if NODE is None:
        pytest.skip("Node.js is not installed")
    return _NODE.calls(listed)


def call(name: str, argument: Any) -> Any:
    """Calls one function of the browser's engine in Node.js and returns its result."""
    (result,) = calls((name, argument))
    assert "value" in result, result
    return result["value"]


def tokenizer_files(directory: Path) -> dict[str, Any]:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    templates = ("chat_template.jinja",)
    present: Sequence[str] = [name for name in (*names, *templates) if (directory / name).is_file()]
    return {"files": {name: str(directory / name) for name in present}}
