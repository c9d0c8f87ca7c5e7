"""Helpers of tests that run commands on a recipe and read the lines that they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.cli import main

MODEL = Path(__file__).parent.parent.parent / "recipes" / "models" / "tiny"


VERBS = ("validate", "plan", "run")


def said(capsys: pytest.CaptureFixture[str], verb: str, text: str) -> list[str]:
    """Writes a faulty recipe, runs a command on it, and returns the lines that it prints on standard
    error."""
    Path("r.yaml").write_text(text)
    assert main([verb, "r.yaml"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert not Path("dist").exists()
    return err.splitlines()
