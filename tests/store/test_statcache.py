"""Tests of the cache of digests, recent keys and imports, and of damage to it."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.canon import bytes_digest
from mlcbuild.errors import SourceError
from mlcbuild.store import stamp, statcache
from mlcbuild.store.statcache import StatCache
from mlcbuild.store.store import Store


def old(path: Path, data: bytes, age: float = 60.0) -> Path:
    """Writes a file whose modification time (mtime) is `age` seconds ago; its change time (ctime) is the
    present, because it cannot be set."""
    path.write_bytes(data)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.fixture
def not_racy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables, for a test, the rule that digests of files written just now are not cached."""
    monkeypatch.setattr(stamp, "RACY_NS", -(10**12))


def test_an_unchanged_file_is_not_hashed_again(
    tmp_path: Path, not_racy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old(tmp_path / "f", b"data")
    first = StatCache(tmp_path / "index")
    digest, actual = first.digest(path)
    assert digest == bytes_digest(b"data") and actual.st_size == 4
    first.save()
    monkeypatch.setattr(statcache, "file_digest", lambda _: "hashed again")
    assert StatCache(tmp_path / "index").digest(path)[0] == digest
    path.write_bytes(b"DATA")
    assert StatCache(tmp_path / "index").digest(path)[0] == "hashed again"


def test_a_change_that_restores_size_and_mtime_is_seen(tmp_path: Path, not_racy: None) -> None:
    path = old(tmp_path / "f", b"data")
    cache = StatCache(tmp_path / "index")
    cache.digest(path)
    before = path.stat()
    path.write_bytes(b"DATA")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.digest(path)[0] == bytes_digest(b"DATA")


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old(tmp_path / "f", b"data")  # the mtime is old, the ctime is not: that counts as well
    cache = StatCache(tmp_path / "index")
    cache.digest(path)
    monkeypatch.setattr(statcache, "file_digest", lambda _: "hashed again")
    assert cache.digest(path)[0] == "hashed again"


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"")

    def grow(read: Path) -> str:
        with read.open("ab") as file:
            file.write(b"x")
        return "0"

    monkeypatch.setattr(statcache, "file_digest", grow)
    with pytest.raises(SourceError, match="f changes while it is read: let its writer finish"):
        StatCache(tmp_path / "index").digest(path)


def test_recent_keys_are_kept_latest_first(tmp_path: Path) -> None:
    for number in (*range(10), 7):
        cache = StatCache(tmp_path / "index")
        cache.remember({"a": f"key{number}", "b": "same"})
        cache.save()
    stat_cache = StatCache(tmp_path / "index")
    assert stat_cache.keys("a") == [f"key{number}" for number in (7, 9, 8, 6, 5, 4, 3, 2)]
    assert stat_cache.keys("b") == ["same"]
    assert stat_cache.keys("c") == []


@pytest.mark.parametrize(
    "data", [b"not a database, but long enough to look at " * 40, b"SQLite format 3\0" + b"\xff" * 2000]
)
def test_a_broken_index_is_replaced(tmp_path: Path, data: bytes) -> None:
    index = tmp_path / "index"
    index.write_bytes(data)
    cache = StatCache(index)
    assert cache.keys("a") == []
    cache.remember({"a": "key"})
    cache.save()
    assert StatCache(index).keys("a") == ["key"]


def test_a_damaged_digest_in_the_index_is_not_believed(tmp_path: Path, not_racy: None) -> None:
    path = old(tmp_path / "f", b"data")
    cache = StatCache(tmp_path / "index")
    digest = cache.digest(path)[0]
    cache.save()
    for change in ("digest = ?", "digest = ?, checksum = ''", "digest = ?, size = 'x'"):
        with sqlite3.connect(tmp_path / "index") as database:
            database.execute(f"update hashed set {change}", ("00" * 32,))
        database.close()
        assert StatCache(tmp_path / "index").digest(path)[0] == digest


def test_imports_are_remembered_unless_damaged_or_read_by_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"

    def remember() -> None:
        cache = StatCache(index)
        cache.imports()["00" * 32, "package"] = ("a.b", "c")
        cache.imports()["11" * 32, ""] = ()
        cache.save()

    remember()
    assert StatCache(index).imports() == {("00" * 32, "package"): ("a.b", "c"), ("11" * 32, ""): ()}
    for change in ("modules = 'a.b'", "package = 'other'", "checksum = ''", f"source = '{'22' * 32}'"):
        with sqlite3.connect(index) as database:
            database.execute(f"update imports set {change} where package = 'package'")
        database.close()
        assert StatCache(index).imports() == {("11" * 32, ""): ()}, change
        remember()
        assert StatCache(index).imports()["00" * 32, "package"] == ("a.b", "c")
    monkeypatch.setattr("mlcbuild.store.statcache.import_reader", lambda: "another version")
    assert StatCache(index).imports() == {}


def test_an_index_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = StatCache(tmp_path / "file" / "index")
    cache._new_files[1, 2] = (1, 2, 3, "digest", "")
    cache.remember({"a": "key"})
    cache.save()
    assert cache.keys("a") == ["key"]


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mlcbuild.store.statcache import StatCache\n"
        "for n in range(10):\n"
        "    cache = StatCache(Path(sys.argv[1]))\n"
        "    cache.remember({f'{sys.argv[2]}/{n}': 'key'})\n"
        "    cache.save()\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "index", str(n)]) for n in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    stat_cache = StatCache(tmp_path / "index")
    assert all(stat_cache.keys(f"{process}/{n}") == ["key"] for process in range(3) for n in range(10))


def test_large_inode_numbers_survive(tmp_path: Path) -> None:
    cache = StatCache(tmp_path / "index")
    cache._new_files[2**64 - 1, 2**63] = (1, 2, 3, "digest", "")
    cache.save()
    assert StatCache(tmp_path / "index")._known_files()[2**64 - 1, 2**63][:4] == (1, 2, 3, "digest")


def test_ten_thousand_entries_are_read_quickly(tmp_path: Path) -> None:
    """Checks that the time for reading cached digests grows linearly with their number."""

    def spent(count: int) -> float:
        path = tmp_path / str(count)
        cache = StatCache(path)
        cache._new_files.update({(1, number): (1, 2, 3, "ab" * 32, "") for number in range(count)})
        cache.save()
        started = time.process_time()
        assert len(StatCache(path)._known_files()) == count
        return time.process_time() - started

    # The least of three: one of them may pay for a collection of the garbage of other tests.
    assert min(spent(10_000) for _ in range(3)) < 40 * max(spent(1000) for _ in range(5))


SCHEMAS = {
    "an endless view": """create view hashed as
        with recursive t(x) as (select 1 union all select x + 1 from t)
        select x device, x inode, x size, x mtime, x ctime, x day, x digest, x checksum from t""",
    "other columns": "create table step (name)",
    "a trigger": """create table step (name text primary key, keys text) without rowid;
        create trigger t after insert on step begin select raise(abort, 'no'); end""",
    "no text": """create table step (name text primary key, keys text) without rowid;
        insert into step values ('b', cast(x'ff' as text))""",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_index_with_other_contents_is_replaced(tmp_path: Path, not_racy: None, name: str) -> None:
    index = tmp_path / "index"
    with sqlite3.connect(index) as database:
        database.executescript(SCHEMAS[name])
    database.close()
    path = old(tmp_path / "f", b"data")
    cache = StatCache(index)
    assert cache.keys("a") == [] and cache.digest(path)[0] == bytes_digest(b"data")
    cache.remember({"a": "key"})
    cache.save()
    assert StatCache(index).keys("a") == ["key"]


@pytest.mark.parametrize("kind", ["socket", "device", "journal"])
def test_what_is_no_file_in_place_of_an_index_is_replaced(tmp_path: Path, kind: str) -> None:
    index = tmp_path / "index"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(index))
    elif kind == "device":
        try:
            os.mknod(index, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root can create devices")
    else:
        (tmp_path / "elsewhere").write_text("kept")
        (tmp_path / "index-journal").symlink_to(tmp_path / "elsewhere")
    cache = StatCache(index)
    cache.remember({"a": "key"})
    cache.save()
    assert StatCache(index).keys("a") == ["key"]
    assert kind != "journal" or (tmp_path / "elsewhere").read_text() == "kept"


def test_a_locked_index_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def counted(path: Path | str, timeout: float = 0.0, **more: Any) -> sqlite3.Connection:
        waits.append(timeout)
        return connect(path, timeout=0, **more)

    with closing(connect(tmp_path / "index", isolation_level=None)) as other:
        other.execute("pragma journal_mode = delete")
        other.execute("begin exclusive")
        monkeypatch.setattr("sqlite3.connect", counted)
        cache = StatCache(tmp_path / "index")
        assert cache.keys("a") == [] and cache.imports() == {}
        cache.remember({"a": "key"})
        cache.save()
    assert waits == [statcache.LOCK_SECONDS]


def test_no_other_user_can_write_what_is_believed(
    tmp_path: Path, not_racy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that in a store which other users can write, the digests of a user are kept in a directory that
    is the user's, and that such a directory of somebody else is not used."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o777)
    own = root / f"user-{os.geteuid()}"
    path = old(tmp_path / "f", b"data")

    def again() -> str:
        cache = Store(root).cache
        cache.digest(path)
        cache.save()
        return cache.digest(path)[0]

    digest = again()
    assert (own / "index.sqlite").is_file() and own.stat().st_mode & 0o777 == 0o700
    assert not (root / "index.sqlite").exists()
    monkeypatch.setattr(statcache, "file_digest", lambda _: "hashed again")
    assert again() == digest
    own.chmod(0o770)
    assert again() == "hashed again"
    own.chmod(0o700)
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    assert again() == "hashed again"
    own.unlink()
    root.chmod(0o755)
    assert again() == "hashed again" and (root / "index.sqlite").is_file() and not own.exists()
