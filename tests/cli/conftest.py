"""Fixtures for tests of the command line: one recipe that is not built, and one that is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, ROOT, project


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with `recipe.yaml` and its model, of which nothing is built. Tests must not change
    it."""
    directory = tmp_path_factory.mktemp("place")
    project(directory, QUICKSTART)
    shutil.copy(ROOT / "recipes" / "prompts" / "tiny.txt", directory / "prompts.txt")
    return directory


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the directory of a recipe of which nothing is built the current one, sets MLCBUILD_STORE to a new
    empty store, and returns the directory."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    return place


@pytest.fixture
def built(tiny_bundles: Path, common_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the directory of the quick start's recipe, whose bundles are built, the current one, sets
    MLCBUILD_STORE to the store that all tests share, and returns the directory."""
    monkeypatch.chdir(tiny_bundles)
    monkeypatch.setenv("MLCBUILD_STORE", str(common_store))
    return tiny_bundles
