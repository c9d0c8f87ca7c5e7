"""Tests of a directory as a remote, call by call."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import directory as module
from mlcbuild.remotes.directory import Directory
from mlcbuild.remotes.transport import DamagedError, SlowError

NAME = "cas/" + "a" * 64


def content(remote: Directory, start: int = 0) -> bytes | None:
    body = remote.open(NAME, start)
    if body is None:
        return None
    with body:
        assert body.start == start
        return b"".join(iter(body.read, b""))


def test_what_is_put_is_there(tmp_path: Path) -> None:
    remote = Directory(tmp_path)
    assert content(remote) is None and remote.size(NAME) is None
    remote.put(NAME, io.BytesIO(b"0123456789"), 10)
    assert content(remote) == b"0123456789" and content(remote, 4) == b"456789" and remote.size(NAME) == 10
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o444
    remote.put(NAME, io.BytesIO(b"new and more"), 3)
    assert content(remote) == b"new"
    assert not list((tmp_path / "tmp").iterdir())
    remote.close()


def test_a_missing_directory_is_never_made(tmp_path: Path) -> None:
    remote = Directory(tmp_path / "mount")
    for call in (
        lambda: remote.open(NAME),
        lambda: remote.size(NAME),
        lambda: remote.put(NAME, io.BytesIO(b"a"), 1),
    ):
        with pytest.raises(RemoteError, match=r"there is no directory .*mount: create it, or mount it"):
            call()
    assert not (tmp_path / "mount").exists()


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    place = tmp_path / NAME
    place.parent.mkdir()
    os.mkfifo(place) if kind == "fifo" else place.mkdir()
    remote = Directory(tmp_path)
    for call in (lambda: remote.open(NAME), lambda: remote.size(NAME)):
        with pytest.raises(DamagedError, match="it is not a regular file"):
            call()


def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    remote = Directory(tmp_path)
    with pytest.raises(RemoteError, match="it cannot be written: 7 of 10 bytes to send are missing"):
        remote.put(NAME, io.BytesIO(b"abc"), 10)
    assert content(remote) is None and not list((tmp_path / "tmp").iterdir())


def test_old_parts_are_removed_once(tmp_path: Path) -> None:
    parts = tmp_path / "tmp"
    parts.mkdir()
    old, young = "0" * 32, "1" * 32
    for name, age in ((old, 90_000), (young, 80_000), ("own.txt", 90_000)):
        (parts / name).write_text("")
        os.utime(parts / name, (parts.stat().st_mtime - age,) * 2)
    remote = Directory(tmp_path)
    remote.put(NAME, io.BytesIO(b"a"), 1)
    assert {path.name for path in parts.iterdir()} == {young, "own.txt"}, "other files are left alone"
    (parts / old).write_text("")
    os.utime(parts / old, (0, 0))
    remote.put(NAME, io.BytesIO(b"a"), 1)
    assert (parts / old).exists()


def test_a_file_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(module, "_check", lambda root: gate.wait(60))
    remote = Directory(tmp_path, timeout=0.01)
    with pytest.raises(SlowError, match="it does not answer"):
        remote.size(NAME)
    gate.set()


def test_what_the_system_refuses_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cas").write_text("")
    remote = Directory(tmp_path)
    with pytest.raises(RemoteError, match="it cannot be read: Not a directory"):
        remote.open(NAME)
    with pytest.raises(RemoteError, match="it cannot be written: File exists"):
        remote.put(NAME, io.BytesIO(b"a"), 1)
