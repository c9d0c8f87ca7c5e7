"""Tests of directories as remotes if their entries are not regular files, or if their file server does not
respond."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.remotes import client
from tests.remotes.endless import TIMEOUT, dead_mount
from tests.remotes.users import BUILT, REUSED, User, statuses


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.02))
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def odd(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            # The whole path is longer than addresses may be.
            with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
                listener.bind(path.name)

    return make


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "loop", "socket"])
@pytest.mark.parametrize("part", ["ac", "cas"])
def test_only_regular_files_are_read(part: str, kind: str, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    User(tmp_path / "one", root.as_uri()).run()
    for path in (root / part).iterdir():
        odd(kind)(path)
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    user.timeout = TIMEOUT * 10
    result = user.run()
    assert result.ok and user.text(result, "c") == "C\nB\nA" and statuses(result)["c"] == "built"
    assert all(warning.startswith(root.as_uri()) for warning in user.warnings())
    words = "it is not a regular file" if kind in ("fifo", "directory", "device") else "it cannot be read"
    assert words in user.warnings()[0]


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "loop", "socket"])
@pytest.mark.parametrize("shelf", ["known", "partial"])
def test_files_of_the_own_store_are_regular_too(shelf: str, kind: str, tmp_path: Path) -> None:
    """Checks that downloaded records and blobs are read from the local store only if they are regular files,
    because other users may write to that store."""
    root = tmp_path / "shared"
    root.mkdir()
    record = next(r.record for r in User(tmp_path / "one", root.as_uri()).run().steps if r.name == "c")
    assert record is not None
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    place = (
        user.store.root
        / shelf
        / (f"{record.key[:2]}/{record.key}" if shelf == "known" else record.rows[0][1])
    )
    place.parent.mkdir(parents=True)
    place.touch()
    odd(kind)(place)
    result = user.run()
    assert result.ok and user.text(result, "c") == "C\nB\nA" and statuses(result) == REUSED
    assert not user.warnings()


def test_what_arrives_is_not_written_through_a_link(tmp_path: Path) -> None:
    root, mine = tmp_path / "shared", tmp_path / "mine"
    root.mkdir()
    record = next(r.record for r in User(tmp_path / "one", root.as_uri()).run().steps if r.name == "c")
    assert record is not None
    mine.write_text("of somebody else")
    user = User(tmp_path / "two", root.as_uri(), mode="read")
    (user.store.root / "partial").mkdir(parents=True)
    (user.store.root / "partial" / record.rows[0][1]).symlink_to(mine)
    assert statuses(user.run()) == REUSED
    assert mine.read_text() == "of somebody else"


def test_a_writer_replaces_what_is_no_file(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    User(tmp_path / "one", root.as_uri()).run()
    for path in [*(root / "cas").iterdir()]:
        odd("fifo")(path)
    assert User(tmp_path / "two", root.as_uri()).run().ok
    assert statuses(User(tmp_path / "three", root.as_uri()).run()) == REUSED


def test_only_unfinished_uploads_are_swept(tmp_path: Path) -> None:
    """Checks that only unfinished uploads are removed from a remote's directory `tmp`, even if somebody has
    replaced the directory by a link."""
    root, mine = tmp_path / "shared", tmp_path / "mine"
    root.mkdir()
    mine.mkdir()
    (root / "tmp").symlink_to(mine)
    for name in ("letter.txt", "0" * 31, "0" * 32):
        (mine / name).write_text("of yesterday's yesterday")
        os.utime(mine / name, (1e9, 1e9))
    assert User(tmp_path / "one", root.as_uri()).run().ok
    assert sorted(path.name for path in mine.iterdir()) == ["0" * 31, "letter.txt"]


def test_a_directory_whose_server_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    with dead_mount(root):
        user = User(tmp_path / "one", (root / "cache").as_uri())
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert warning.endswith("is not used in this run: it does not answer")
