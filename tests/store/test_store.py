"""The store by itself: publishing, damage, first record wins, locks, remembered digests, records."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.canon import Entry, Tree, bytes_digest
from mlcbuild.errors import SourceError, StepError, StoreError
from mlcbuild.store import statcache
from mlcbuild.store.links import copy, link_or_copy
from mlcbuild.store.locks import holder, try_lock
from mlcbuild.store.records import BuildInfo, Measured, Preimage, Record
from mlcbuild.store.staging import remove_tree
from mlcbuild.store.stamp import STAMP
from mlcbuild.store.statcache import StatCache
from mlcbuild.store.store import Published, Store, default_root

IMAGE = Preimage("m:f", {"p": [1, "x"]}, {"m.py": "00" * 32}, {"tool": "1"}, {})
MADE = BuildInfo("weights/tiny", IMAGE, Measured(1500, 900, 1 << 20))
KEY = IMAGE.key()
OTHER = BuildInfo("weights/other", Preimage("m:f", {"p": 2}, {}, {}, {}))
OTHER_KEY = OTHER.preimage.key()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def put(store: Store, files: dict[str, bytes], key: str = KEY, made: BuildInfo = MADE) -> Published:
    with store.staging() as session:
        out = session.subdirectory() / "out"
        for name, data in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return store.publish(key, made, out, {})


def test_what_is_published_is_found_and_linked_out(store: Store, tmp_path: Path) -> None:
    published = put(store, {"a.txt": b"one", "deep/b.bin": b"two", "deep/empty": b""})
    record = Store(store.root).find(KEY)
    assert record == published.record and record is not None
    assert record.info == MADE
    assert record.files == (
        Entry("a.txt", bytes_digest(b"one"), 3),
        Entry("deep/b.bin", bytes_digest(b"two"), 3),
        Entry("deep/empty", bytes_digest(b""), 0),
    )
    assert record.tree == Tree.of(record.files).digest
    store.link_out(record.files, tmp_path / "here")
    linked = tmp_path / "here" / "deep" / "b.bin"
    assert linked.read_bytes() == b"two"
    assert linked.samefile(store.blob(bytes_digest(b"two")))
    assert linked.stat().st_mode & 0o777 == 0o444
    assert linked.stat().st_mtime_ns == STAMP * 10**9


def test_nothing_but_results_is_left_behind(store: Store) -> None:
    put(store, {"a": b"1"})
    assert not any((store.root / "tmp").iterdir())
    assert not any((store.root / "locks").iterdir())


def test_one_content_is_stored_once(store: Store) -> None:
    put(store, {"a": b"same", "b": b"same"})
    put(store, {"c": b"same"}, OTHER_KEY, OTHER)
    assert sum(path.is_file() for path in (store.root / "cas").rglob("*")) == 1


def test_the_first_record_wins_and_a_second_result_is_a_fault(store: Store) -> None:
    first = put(store, {"a": b"1", "same": b"s"})
    assert put(store, {"a": b"1", "same": b"s"}) == first
    second = put(store, {"a": b"2", "same": b"s", "b": b"new"})
    assert second.record == first.record == store.find(KEY)
    assert second.fault == (
        "step weights/tiny is not reproducible: built twice from the same inputs it gave different bytes in "
        f"a, b; key {KEY}"
    )


def test_a_record_whose_files_are_gone_is_replaced(store: Store) -> None:
    first = put(store, {"a": b"1"})
    store.blob(bytes_digest(b"1")).unlink()
    assert store.find(KEY) is None
    assert store.lost(first.record) == "a is missing from the store"
    healed = put(store, {"a": b"2"})
    assert "not reproducible" in healed.fault
    assert store.find(KEY) == healed.record != first.record


def damage(blob: Path, data: bytes) -> None:
    blob.chmod(0o644)
    blob.write_bytes(data)
    blob.chmod(0o444)


def test_a_changed_blob_counts_as_missing_and_is_healed(store: Store) -> None:
    record = put(store, {"a": b"right"}).record
    damage(store.blob(bytes_digest(b"right")), b"wrong")
    assert store.find(KEY) is None
    assert store.lost(record) == "a is damaged in the store"
    warning = store.take_warnings()[-1]
    assert "a of step weights/tiny was changed in the store after it was written" in warning
    assert str(store.root) in warning
    put(store, {"a": b"right"})
    assert store.find(KEY) == record
    assert store.blob(bytes_digest(b"right")).read_bytes() == b"right"


def test_a_truncated_blob_counts_as_missing_even_with_the_right_time(store: Store) -> None:
    put(store, {"a": b"right"})
    blob = store.blob(bytes_digest(b"right"))
    damage(blob, b"righ")
    os.utime(blob, (STAMP, STAMP))
    assert store.find(KEY) is None


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"files":[],"format":"record/1","tree":"x"}\n{"a":1', b"\0" * 80, b"[]\n{}\n"]
)
def test_a_torn_record_counts_as_none_and_is_replaced(store: Store, data: bytes) -> None:
    record = put(store, {"a": b"1"}).record
    path = store.root / "ac" / KEY[:2] / KEY
    damage(path, data)
    assert store.find(KEY) is None
    (warning,) = store.take_warnings()
    assert warning.startswith(f"{path}: the record is not used: it is ") and warning.endswith(
        "is built again"
    )
    assert put(store, {"a": b"1"}) == Published(record)
    assert store.find(KEY) == record


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_a_record_that_points_out_of_its_tree_is_refused(path: str) -> None:
    data = Record(KEY, "tt", ((path, "00" * 32, 1),), b"{}").encode()
    with pytest.raises(ValueError, match=r"names the file|is not a path"):
        Record.decode(KEY, data)


PLAIN = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\."), min_size=1, max_size=8
)
ENTRIES = st.lists(
    st.builds(Entry, PLAIN, st.just("ab" * 32), st.integers(0, 2**50)), max_size=4, unique_by=lambda e: e.path
)


@given(ENTRIES, PLAIN, st.dictionaries(PLAIN, st.integers() | PLAIN, max_size=3), st.booleans())
def test_records_read_back_as_written(
    entries: list[Entry], step: str, params: dict[str, int | str], shared: bool
) -> None:
    image = Preimage("m:f", params, {"m.py": "00"}, {"t": "1"}, {"in": Tree.of(entries)})
    info = BuildInfo(step, image, Measured(1, 2, 3), shared)
    record = Record.create(image.key(), Tree.of(entries), info)
    back = Record.decode(record.key, record.encode())
    assert back == record
    assert back.info == info
    assert back.consistent()
    assert not Record("00" * 32, record.tree, record.rows, record.rest).consistent()


def test_a_copied_store_works(store: Store, tmp_path: Path) -> None:
    put(store, {"a": b"1", "b/c": b"2"})
    subprocess.run(["cp", "-r", store.root, tmp_path / "copy"], check=True)  # loses the mtimes
    remove_tree(store.root)
    other = Store(tmp_path / "copy")
    found = other.find(KEY)
    assert found is not None and other.take_warnings() == []
    assert other.blob(bytes_digest(b"1")).stat().st_mtime == STAMP


def test_no_path_of_this_machine_is_inside(store: Store, tmp_path: Path) -> None:
    put(store, {"a": b"1"})
    (tmp_path / "source").write_text("x")
    os.utime(tmp_path / "source", (1, 1))
    store.cache.digest(tmp_path / "source")
    store.cache.remember({"weights/tiny": KEY})
    store.cache.save()
    for path in store.root.rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes()


def test_an_output_that_links_an_input_is_recognised_without_hashing(store: Store) -> None:
    record = put(store, {"w": b"weights"}).record
    with store.staging() as session:
        area = session.subdirectory()
        store.link_out(record.files, area / "in")
        (area / "out").mkdir()
        link_or_copy(area / "in" / "w", area / "out" / "renamed")
        found = (area / "in" / "w").stat()
        # The digest told here is believed only because inode, size and mtime say it is that very blob.
        known = {(found.st_dev, found.st_ino): record.files[0]}
        bundle = store.publish(OTHER_KEY, OTHER, area / "out", known).record
    assert bundle.files == (Entry("renamed", record.files[0].digest, 7),)


def test_a_file_of_the_users_that_is_linked_into_an_output_stays_as_it_is(
    store: Store, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    with store.staging() as session:
        out = session.subdirectory() / "out"
        out.mkdir()
        (out / "f").hardlink_to(mine)
        record = store.publish(KEY, MADE, out, {}).record
    assert not mine.samefile(store.blob(record.files[0].digest))
    assert mine.stat().st_mode & 0o200
    mine.write_bytes(b"changed")
    assert store.find(KEY) == record


def test_only_files_can_be_published(store: Store) -> None:
    with store.staging() as session:
        out = session.subdirectory() / "out"
        out.mkdir()
        os.mkfifo(out / "pipe")
        with pytest.raises(StepError, match="its output pipe is not a regular file"):
            store.publish(KEY, MADE, out, {})
    with store.staging() as session:
        out = session.subdirectory() / "out"
        (out / "real").mkdir(parents=True)
        (out / "link").symlink_to("real")
        with pytest.raises(StepError, match="its output link is not a regular file"):
            store.publish(KEY, MADE, out, {})


def test_blobs_and_records_from_elsewhere_are_checked(store: Store) -> None:
    record = put(store, {"a": b"1"}).record
    with store.staging() as session:
        part = session.subdirectory() / "part"
        part.write_bytes(b"other bytes")
        with pytest.raises(StoreError, match="has other bytes"):
            store.put_blob(bytes_digest(b"1"), part)
        other = Record.create(OTHER_KEY, Tree.of([Entry("x", bytes_digest(b"2"), 1)]), OTHER)
        with pytest.raises(StoreError, match="before its files: x is missing"):
            store.put_record(other, session.subdirectory() / "record")
        part.write_bytes(b"2")
        store.put_blob(bytes_digest(b"2"), part)
        assert store.put_record(other, session.subdirectory() / "record").record == other
    assert store.find(OTHER_KEY) == other
    assert store.find(KEY) == record


def test_sessions_remove_what_dead_processes_left_and_nothing_of_the_living(store: Store) -> None:
    with store.staging() as alive:
        mine = alive.subdirectory() / "work"
        mine.write_text("x")
        key_lock = store.try_lock("44" * 32)
        assert key_lock is not None
        dead = store.root / "tmp" / "dead"
        (dead / "1").mkdir(parents=True)
        (dead / "1").chmod(0o555)
        (store.root / "tmp" / "dead.lock").write_text("1 nowhere")
        (store.root / "tmp" / "orphan").mkdir()
        (store.root / "locks" / ("55" * 32)).write_text("1 nowhere")
        with Store(store.root).staging():
            assert mine.exists()
            assert not dead.exists()
            assert not (store.root / "tmp" / "orphan").exists()
            assert [path.name for path in (store.root / "locks").iterdir()] == ["44" * 32]
        key_lock.release()
    assert not any((store.root / "tmp").iterdir())


def test_a_lock_has_one_holder_and_says_who(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = try_lock(path)
    assert lock is not None
    assert try_lock(path) is None
    assert holder(path) == f"pid {os.getpid()}"
    lock.release()
    assert not path.exists()
    assert holder(path) == "just ended"
    path.write_text("12 another-host")
    assert holder(path) == "pid 12 on another-host"
    path.write_text("")
    assert holder(path) == "pid not known yet"


def test_a_lock_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mlcbuild.store.locks import try_lock\n"
        "lock = try_lock(Path(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "lock"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert try_lock(tmp_path / "lock") is None
        process.kill()
    assert try_lock(tmp_path / "lock") is not None


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


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    for text, found in (
        ('{"format": "mlcbuild-store/9"}', "mlcbuild-store/9"),
        ("x", "something unreadable"),
    ):
        (tmp_path / "store.json").write_text(text)
        with pytest.raises(
            StoreError, match=f"format is {found}, this mlcbuild knows mlcbuild-store/1; update"
        ):
            Store(tmp_path)


def test_a_store_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError, match=r"the store at .*file/store cannot be written: Not a directory.* MLCBUILD_STORE"
    ):
        Store(tmp_path / "file" / "store").staging()


def test_where_the_store_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root({"MLCBUILD_STORE": str(tmp_path)}) == tmp_path
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "mlcbuild"
    assert default_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "mlcbuild"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_root({}) == Path.home() / "Library" / "Caches" / "mlcbuild"


def test_log_names_stay_below_the_store(store: Store) -> None:
    assert store.log("weights/a b/../c") == store.root / "logs" / "weights" / "a_b" / "_" / "c.log"


def test_copies_carry_the_stamp_only_of_blobs(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"x" * 100_000)
    copy(tmp_path / "plain", tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"x" * 100_000
    assert (tmp_path / "copied").stat().st_mode & 0o200
    os.utime(tmp_path / "plain", (STAMP, STAMP))
    copy(tmp_path / "plain", tmp_path / "stamped")
    assert (tmp_path / "stamped").stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "stamped").stat().st_mtime == STAMP


# Remembered digests


def old(path: Path, data: bytes, age: float = 60.0) -> Path:
    """Returns a file that was written a while ago as far as its mtime tells. Its ctime is now, as any
    file's."""
    path.write_bytes(data)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.fixture
def not_racy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a file written this very moment be remembered, for the tests of everything but that rule."""
    monkeypatch.setattr(statcache, "RACY_NS", -(10**12))


def test_an_unchanged_file_is_not_hashed_again(
    tmp_path: Path, not_racy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old(tmp_path / "f", b"data")
    first = StatCache(tmp_path / "index")
    digest, found = first.digest(path)
    assert digest == bytes_digest(b"data") and found.st_size == 4
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
    found = StatCache(tmp_path / "index")
    assert found.keys("a") == [f"key{number}" for number in (7, 9, 8, 6, 5, 4, 3, 2)]
    assert found.keys("b") == ["same"]
    assert found.keys("c") == []


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
    found = StatCache(tmp_path / "index")
    assert all(found.keys(f"{process}/{n}") == ["key"] for process in range(3) for n in range(10))


def test_large_inode_numbers_survive(tmp_path: Path) -> None:
    cache = StatCache(tmp_path / "index")
    cache._new_files[2**64 - 1, 2**63] = (1, 2, 3, "digest", "")
    cache.save()
    assert StatCache(tmp_path / "index")._known_files()[2**64 - 1, 2**63][:4] == (1, 2, 3, "digest")


def test_ten_thousand_entries_are_read_quickly(tmp_path: Path) -> None:
    """In time that grows with their number: were all read again for each, it would be 100 times as long."""

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
