"""Calls functions of the browser's engine in Node.js, which runs JavaScript but has no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from . import shared

NODE = shutil.which("node")
ENGINE = shared.ROOT / "runtime" / "mlcbuild_runtime" / "browser"


def calls(*listed: tuple[str, Any]) -> list[dict[str, Any]]:
    """Calls functions of the browser's engine, each (name, arguments), in one Node.js process. Returns
    {"value": result} or {"error": message} for each. Skips the test if there is no Node.js."""
    if NODE is None:
        pytest.skip("Node.js is not installed")
    script = Path(__file__).with_name("browser_calls.mjs")
    result = subprocess.run(
        [NODE, str(script)],
        input=json.dumps({"calls": listed}),
        capture_output=True,
        text=True,
        check=False,
        timeout=shared.WAIT,
    )
    assert result.returncode == 0, result.stderr
    results: list[dict[str, Any]] = json.loads(result.stdout)
    return results


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
