"""Tests of the temporary directories of living processes in a store, and of removing those of killed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.store.staging import StagingArea, living, remove


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tmp", "locks"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_subdirectories_are_empty_and_distinct(root: Path) -> None:
    with StagingArea.start(root) as staging:
        first, second = staging.subdirectory(), staging.subdirectory()
        assert first != second and not [*first.iterdir(), *second.iterdir()]


def test_closing_removes_the_area_and_what_is_read_only_in_it(root: Path) -> None:
    with StagingArea.start(root) as staging:
        directory = staging.subdirectory()
        (directory / "file").write_text("x")
        directory.chmod(0o555)
        assert living(root)
    assert not staging.directory.exists() and not living(root)


def test_what_a_killed_process_left_is_removed_and_the_living_stay(root: Path) -> None:
    left, loose = root / "tmp" / "left", root / "tmp" / "loose"
    for directory in (left, loose):
        directory.mkdir()
        (directory / "part").write_text("x")
    left.with_suffix(".lock").touch()
    with StagingArea.start(root) as alive, StagingArea.start(root) as other:
        assert not left.exists() and not loose.exists()
        assert alive.directory.is_dir() and other.directory.is_dir()


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    remove(tmp_path / "link")
    remove(tmp_path / "missing")
    assert target.is_dir() and not (tmp_path / "link").is_symlink()
