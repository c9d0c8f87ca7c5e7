"""Helpers for tests that call the command line in the test's own process and read its output."""

from __future__ import annotations

import pytest

from mlcbuild.cli import main

Out = pytest.CaptureFixture[str]
BUNDLE = "dist/tiny-q4f16_1-host"


def said(out: Out, code: int, *argv: str) -> tuple[str, str]:
    """Returns stdout and stderr of a command, after asserting that it ends with this exit code."""
    actual = main(argv)
    stdout, stderr = out.readouterr()
    assert actual == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    return stdout, stderr
