"""Tests of file locks: one holder at a time, lock files that are removed on release, and obstacles in their
place."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlcbuild.store.locks import holder, try_lock, wait_lock


def test_one_holder_at_a_time_in_this_process_too(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = try_lock(path)
    assert lock is not None and try_lock(path) is None
    assert holder(path).startswith(f"pid {os.getpid()}")
    lock.release()
    assert not path.exists(), "locks leave nothing behind"
    with wait_lock(path):
        assert try_lock(path) is None


def test_readers_share_and_keep_a_writer_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with wait_lock(path, shared=True, keep=True):
        second = try_lock(path, shared=True, keep=True)
        assert second is not None and try_lock(path) is None
        second.release()
    assert path.exists()
    writer = try_lock(path, keep=True)
    assert writer is not None
    assert try_lock(path, shared=True) is None
    writer.release()


def test_the_system_drops_the_lock_of_a_dead_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from mlcbuild.store.locks import try_lock;"
        "lock = try_lock(Path(sys.argv[1])); print(lock is not None, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "True\n" and try_lock(path) is None
    assert holder(path).startswith(f"pid {other.pid}")
    other.kill()
    other.communicate()
    lock = try_lock(path)
    assert lock is not None
    lock.release()


def test_waiting_ends_when_the_holder_releases(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []
    first = try_lock(path)
    assert first is not None

    def wait() -> None:
        with wait_lock(path):
            order.append("second")

    thread = threading.Thread(target=wait)
    thread.start()
    order.append("first")
    first.release()
    thread.join(60)
    assert order == ["first", "second"] and not thread.is_alive()


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_what_lies_there_and_is_no_file_is_removed(tmp_path: Path, put: Callable[[Path], object]) -> None:
    path = tmp_path / "lock"
    put(path)
    lock = try_lock(path)
    assert lock is not None and path.is_file() and not path.is_symlink()
    lock.release()


def test_a_holder_that_wrote_nonsense_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"\x1b[2J\xff not a number")
    assert holder(path) == "pid not known yet"
    path.write_bytes(b"42 \x1b[2Jhost")
    assert holder(path) == "pid 42 on \\x1b[2Jhost"


def test_a_lock_that_cannot_be_written_is_free(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            try_lock(tmp_path / "lock")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert try_lock(tmp_path / "lock") is not None


def test_many_takers_never_hold_one_lock_together(tmp_path: Path) -> None:
    inside: list[int] = []

    def take(number: int) -> bool:
        for _ in range(40):
            lock = try_lock(tmp_path / "lock")
            if lock is not None:
                inside.append(number)
                alone = inside == [number]
                inside.remove(number)
                lock.release()
                if not alone:
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(take, range(4)))


def test_a_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder(path) == "just ended"
    path.write_text("12 another-host")
    assert holder(path) == "pid 12 on another-host"
    path.write_text("")
    assert holder(path) == "pid not known yet"
