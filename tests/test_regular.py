"""Tests of reading files that may not be regular files."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from mlcbuild_format import regular


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("follow_link", [True, False])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "a directory"),
        (os.mkfifo, "a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (_socket, "a socket"),
    ],
)
def test_only_regular_files_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    words: str,
    follow_link: bool,
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("x")
    make(path)
    if path.is_symlink() and not follow_link:
        words = "a symbolic link"
    with pytest.raises(OSError, match=f"it is {words}, not a regular file") as caught:
        regular.read(path, 9, follow_link=follow_link)
    assert caught.value.errno == errno.EINVAL


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456789")
    (tmp_path / "link").symlink_to("file")
    assert regular.read(tmp_path / "link", 9) == b"123456789"
    with pytest.raises(OSError, match="it is larger than 8 bytes") as caught:
        regular.read(tmp_path / "link", 8)
    assert caught.value.errno == errno.EFBIG
