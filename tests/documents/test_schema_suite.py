"""Tests of ci/bench/schemas with a small test suite: what it counts, and what makes it fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

GROUPS = [
    {
        "description": "an object",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "tests": [
            {"data": {"a": 3}, "valid": True},
            {"data": {"b": "x", "a": 3}, "valid": True},
            {"data": {"a": 2}, "valid": False},
            {"data": {"a": 3, "c": 1}, "valid": False},
        ],
    },
    {"description": "nothing", "schema": False, "tests": [{"data": 1, "valid": False}]},
    {"description": "anything", "schema": True, "tests": [{"data": [1, {"a": None}], "valid": True}]},
    {"description": "unsupported", "schema": {"unevaluatedItems": False}, "tests": []},
]


def tried(suite: Path, groups: object) -> subprocess.CompletedProcess[str]:
    place = suite / "tests" / "draft2020-12"
    place.mkdir(parents=True, exist_ok=True)
    (place / "small.json").write_text(json.dumps(groups))
    script = ROOT / "ci" / "bench" / "schemas"
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    command = [sys.executable, str(script), "--suite", str(suite), "--draws", "20"]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )


def test_a_small_suite(tmp_path: Path) -> None:
    result = tried(tmp_path, GROUPS)
    assert result.returncode == 0, result.stdout + result.stderr
    counts, *refused = result.stdout.splitlines()
    assert "4 schemas, " in counts and "2 schemas refused" in counts
    assert "2 valid instances let through" in counts
    assert "1 valid instances kept out" in counts, "the order of properties is fixed"
    assert "2 invalid instances kept out" in counts
    assert any('Unimplemented keys: ["unevaluatedItems"]' in line for line in refused)


def test_what_gets_through_wrongly_is_found(tmp_path: Path) -> None:
    """Checks that the script ci/bench/schemas, which runs a suite of JSON Schema tests, exits with 1 if the
    token constraint of a schema allows a value that the suite lists as invalid."""
    wrong = {"description": "lie", "schema": {"type": "null"}, "tests": [{"data": None, "valid": False}]}
    result = tried(tmp_path, [wrong])
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "small: lie: lets null through"
