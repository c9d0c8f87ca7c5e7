"""Fixtures of the build engine's tests: an empty store, and an area for temporary files in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcbuild.store.staging import StagingArea
from mlcbuild.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def area(store: Store) -> Iterator[StagingArea]:
    with store.staging() as session:
        yield session
