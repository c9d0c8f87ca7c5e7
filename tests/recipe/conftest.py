"""Fixtures of tests of recipes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipe.verbs import MODEL


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a new directory with the small model of the repository in models/tiny, makes it the current
    directory and its `store` the default store, and returns it."""
    shutil.copytree(MODEL, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    return tmp_path
