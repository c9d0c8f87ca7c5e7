"""The suite itself: what it says of tests that this machine cannot run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

from tests.conftest import ROOT, kind

SKIPS = ("pytest.skip", "pytest.mark.skipif", "pytest.importorskip")


def test_what_is_skipped_is_grouped_at_the_end() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/compiler/test_aarch64.py"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MLCBUILD_AARCH64": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    title, line = done.stdout.partition("not tested on this machine")[1:]
    assert title and "   3 need another processor: /nowhere is not there: ci/emulated-aarch64 (3)\n" in line


def test_every_reason_to_skip_says_what_is_missing() -> None:
    """Reasons in conditions and calls are constants, f-strings and names of constants."""
    reasons = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SKIPS:
                values = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                reasons |= {ast.unparse(value) for value in values or node.args[:1]}
    assert len(reasons) > 30
    texts = {reason for reason in reasons if not re.fullmatch(r"[\w.]+", reason)}
    assert not {text for text in texts if kind(text) == "something else"}


CLOCKS = re.compile(r"\btime\.(?:process_time|thread_time|perf_counter|monotonic|time)(?:_ns)?\(")


def compared_with_numbers(function: ast.FunctionDef) -> list[str]:
    """Returns the assertions of a test that compare a reading of a clock with a number of seconds, where the
    reading is in the assertion itself or in a variable of the test."""
    timed = {
        ast.unparse(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and CLOCKS.search(ast.unparse(node.value))
    }

    def is_time(text: str) -> bool:
        return bool(CLOCKS.search(text)) or not timed.isdisjoint(re.findall(r"\w+", text))

    return [
        ast.unparse(compared)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for compared in ast.walk(node.test)
        if isinstance(compared, ast.Compare)
        and any(isinstance(side, ast.Constant) and side.value for side in compared.comparators)
        and is_time(ast.unparse(compared.left))
    ]


def test_no_test_asserts_a_number_of_seconds() -> None:
    """A slow or busy machine would fail it: tests count, or compare with work done in the same process."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert not compared_with_numbers(node), f"{path}: {node.name}"
    (wrong,) = ast.parse("def test():\n a = time.time()\n assert time.time() - a < 2").body
    assert isinstance(wrong, ast.FunctionDef) and compared_with_numbers(wrong)
