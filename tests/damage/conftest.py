"""Fixtures for tests of damage: a store that was filled quickly by replaced actions, and copies of it to
damage."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import product
from tests.damage.places import (
    Place,
)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Place:
    actual = Place(tmp_path_factory.mktemp("sound"))
    product.make(actual.root, 1, ("q4f16_1", "q4a8_1"), ("x86-64-v2",))
    result = actual.apart.run()
    assert result.returncode == 0, result.stderr
    return actual


@pytest.fixture
def place(sound: Place, tmp_path: Path) -> Iterator[Place]:
    """Yields a copy of a built recipe with its store and bundles, as separate files that a test may damage.
    The store's receipts, by which a run recognizes that nothing has changed, are deleted, so that the first
    run after a damage checks everything."""
    subprocess.run(["cp", "-a", f"{sound.root}/.", tmp_path / "there"], check=True)
    actual = Place(tmp_path / "there")
    shutil.rmtree(actual.store / "receipts", ignore_errors=True)
    yield actual
    for path in actual.root.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


@pytest.fixture
def reader() -> tuple[str, ...]:
    """Returns the beginning of a command line that starts a process without root's capabilities, so that file
    modes apply to it; () if the user is not root."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root can write everything, and there is no setpriv")
    return ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
