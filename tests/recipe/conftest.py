"""Fixtures of tests of recipes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipe.verbs import MODEL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a new directory with the embedded model the current one, and returns it."""
    shutil.copytree(MODEL, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    return tmp_path
