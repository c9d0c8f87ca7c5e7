"""Tests of hard links, clones and copies of a store's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mlcbuild.store import links
from mlcbuild.store.stamp import STAMP


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"weights" * 1000)
    return path


def refuse(number: int) -> object:
    def link(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return link


def test_a_link_shares_the_inode(source: Path, tmp_path: Path) -> None:
    links.link_or_copy(source, tmp_path / "there")
    assert (tmp_path / "there").samefile(source)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM])
def test_a_file_that_cannot_be_linked_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    links.link_or_copy(source, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == source.read_bytes()
    assert not (tmp_path / "there").samefile(source)


def test_a_full_disk_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        links.link_or_copy(source, tmp_path / "there")


def test_a_copy_falls_back_to_reading_where_ranges_cannot_be_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV), raising=False)
    links.copy(source, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == source.read_bytes()


def test_a_copy_never_replaces_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        links.copy(source, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"mine"


def test_a_copy_of_a_stamped_file_is_stamped_and_read_only(source: Path, tmp_path: Path) -> None:
    links.stamp(source)
    links.copy(source, tmp_path / "there")
    stat = (tmp_path / "there").stat()
    assert stat.st_mtime == STAMP and not stat.st_mode & 0o222
