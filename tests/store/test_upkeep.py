"""Tests of verifying a store, of its status, and of garbage collection."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.store import upkeep
from mlcbuild.store.locks import try_lock
from mlcbuild.store.stamp import STAMP
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import Collected, gc, status, verify
from tests.forkserver import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent
INLINE = Options(executor="inline")
GRAPH = Graph(
    [
        Step("weights/a", "tests.actions:text", {"text": "aaaa"}, {}),
        Step("weights/b", "tests.actions:text", {"text": "bb"}, {}),
        Step("bundle/a", "tests.actions:link", {}, {"w": Input("weights/a")}),
    ]
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    actual = Store(tmp_path / "store")
    assert execute(GRAPH, actual, INLINE).ok
    return actual


def blob(store: Store, name: str) -> Path:
    record = store.find(record_path(store, name).name)
    assert record is not None
    return store.blob(record.files[0].digest)


def record_path(store: Store, name: str) -> Path:
    key = store.cache.keys(name)[0]
    return store.root / "ac" / key[:2] / key


def test_a_sound_store_is_sound(store: Store) -> None:
    report = verify(store)
    assert report.ok
    assert (report.records, report.blobs, report.bytes, report.unused) == (3, 2, 6, 0)


def test_what_gc_removes_meanwhile_is_no_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = upkeep._check, iter([True])

    def check(path: Path) -> int | None:
        if next(first, False):
            gc(Store(store.root), max_bytes=0)
        return real(path)

    monkeypatch.setattr(upkeep, "_check", check)
    report = verify(store)
    assert (report.damaged, report.missing) == ((), ())


def test_what_another_process_replaces_meanwhile_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, damaged = upkeep._check, blob(store, "weights/a")
    first = iter([True])

    def check(path: Path) -> int | None:
        return None if path == damaged and next(first, False) else real(path)

    monkeypatch.setattr(upkeep, "_check", check)
    report = verify(store)
    assert report.ok and report.blobs == 2 and damaged.exists()


def test_a_copied_blob_of_another_user_is_verified(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stamp(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    os.utime(blob(store, "weights/a"))  # as a plain copy of the store does
    monkeypatch.setattr(upkeep, "stamp", stamp)
    assert verify(store).ok


def test_status_and_gc_wait_for_each_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = upkeep._sound_records

    def records(store: Store) -> object:
        assert try_lock(store.root / "lock", keep=True) is None
        return real(store)

    monkeypatch.setattr(upkeep, "_sound_records", records)
    assert status(store).records == 3


def test_bit_rot_is_found_and_repaired(store: Store) -> None:
    rotten = blob(store, "weights/b")
    rotten.chmod(0o644)
    rotten.write_text("bX")
    os.utime(rotten, (STAMP, STAMP))  # like damage below the file system: no time shows it
    report = verify(store)
    assert report.damaged == (
        f"blob {rotten.name} (weights/b: text.txt) has content that does not match its name",
    )
    assert report.missing == ()
    assert not rotten.exists()
    assert verify(store).missing == (f"weights/b: text.txt (blob {rotten.name})",)
    result = execute(GRAPH, Store(store.root), INLINE)
    assert [step.status for step in result.steps].count("built") == 1
    assert verify(store).ok


def test_missing_blobs_and_false_records_are_found(store: Store) -> None:
    gone = blob(store, "weights/b")
    gone.unlink()
    false = record_path(store, "bundle/a")
    data = false.read_bytes().replace(b'"params":{}', b'"params":{"x":1}')
    false.chmod(0o644)
    false.write_bytes(data)
    torn = record_path(store, "weights/a")
    torn.chmod(0o644)
    torn.write_bytes(b"{")
    report = verify(store)
    assert report.missing == (f"weights/b: text.txt (blob {gone.name})",)
    names = sorted((false.name, torn.name))
    assert report.damaged == tuple(f"record {name} does not match its name" for name in names)
    assert verify(store).damaged == () and verify(store).records == 1
    assert execute(GRAPH, Store(store.root), INLINE).ok and verify(store).ok


def test_a_blob_no_record_names_is_counted_and_collected(store: Store) -> None:
    record_path(store, "weights/b").unlink()
    assert verify(store).ok and verify(store).unused == 1
    assert gc(store) == Collected(0, 1, 2)
    assert verify(store).blobs == 1


def test_a_copy_of_a_store_gets_its_stamps_back(store: Store, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", store.root, tmp_path / "copy"], check=True)
    other = Store(tmp_path / "copy")
    assert verify(other).ok
    assert blob(other, "weights/b").stat().st_mtime == STAMP


def test_status_counts_by_kind(store: Store) -> None:
    report = status(store)
    assert (report.records, report.blobs, report.bytes) == (3, 2, 6)
    assert {name: (kind.records, kind.bytes) for name, kind in report.kinds.items()} == {
        "bundle": (1, 4),
        "weights": (2, 6),
    }
    weights = report.kinds["weights"]
    os.utime(record_path(store, "weights/a"), (STAMP, STAMP))
    assert status(store).kinds["weights"].oldest_use == STAMP < weights.oldest_use <= weights.last_used
    assert status(Store(store.root / "absent")).records == 0


def test_gc_drops_what_was_not_used_for_long(store: Store) -> None:
    long_ago = STAMP
    for name in ("weights/a", "weights/b"):
        os.utime(record_path(store, name), (long_ago, long_ago))
    assert gc(store, unused_days=1000) == Collected(2, 1, 2)  # the blob of weights/a is in the bundle too
    assert verify(store).ok


def test_a_reused_record_counts_as_used(store: Store) -> None:
    for name in ("weights/a", "weights/b", "bundle/a"):
        os.utime(record_path(store, name), (STAMP, STAMP))
    execute(GRAPH, store, Options(executor="inline", only=("weights/b",)))
    assert gc(store, unused_days=1000).records == 2
    assert blob(store, "weights/b").exists()


def test_gc_keeps_the_latest_that_fit(store: Store) -> None:
    for number, name in enumerate(("bundle/a", "weights/b", "weights/a")):
        os.utime(record_path(store, name), (number, number))
    assert gc(store, max_bytes=4) == Collected(1, 1, 2)  # the bundle shares the blob of weights/a: both fit
    assert gc(store, max_bytes=0).bytes == 4
    assert status(store).bytes == 0


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([8, 7, 2], [8]),  # 7 does not fit beside 8, and 2 was used before 7
        ([5, 5, 5], [5, 5]),
        ([20, 5], [5]),  # no removal makes room for 20
        ([6, 20, 4, 1], [6, 4]),
        ([6, 5, 0], [6, 0]),  # the removal of an empty file frees nothing
    ],
)
def test_gc_removes_the_least_recently_used_first(sizes: list[int], kept: list[int], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    names = [f"text/{index}" for index in range(len(sizes))]
    steps = [
        Step(name, "tests.actions:text", {"text": str(index) * size}, {})
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    assert execute(Graph(steps), store, INLINE).ok
    for age, name in enumerate(names):
        os.utime(record_path(store, name), (STAMP - age, STAMP - age))
    gc(store, max_bytes=10)
    left = [size for name, size in zip(names, sizes, strict=True) if record_path(store, name).exists()]
    assert left == kept
    assert verify(store).ok and status(store).bytes == sum(kept)


def test_gc_beside_a_run_leaves_what_was_used_lately(store: Store) -> None:
    os.utime(record_path(store, "weights/b"), (STAMP, STAMP))
    stray = store.root / "cas" / "00" / ("0" * 64)
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("placed a moment ago, its record is on its way")
    with store.staging():
        assert gc(store, max_bytes=0) == Collected(1, 0, 0)  # its blob has just been placed
    assert stray.exists()
    assert gc(store, max_bytes=0).records == 2
    assert status(store).bytes == 0
    assert gc(Store(store.root / "absent")) == Collected(0, 0, 0)


def test_gc_waits_while_something_is_published(store: Store) -> None:
    ended = []
    with store.settled():
        thread = threading.Thread(target=lambda: ended.append(gc(store, max_bytes=0)))
        thread.start()
        time.sleep(0.1)
        assert not ended and status(store).records == 3
    thread.join()
    assert ended[0].records == 3


def test_builds_and_gc_at_once(tmp_path: Path) -> None:
    """Checks that garbage collection may run beside two builders on a store with old results, although it
    would remove all of them."""
    source = tmp_path / "source"
    source.mkdir()
    store = Store(tmp_path / "store")
    arguments = [str(store.root), "heavy", str(source)]
    collected = 0
    for content in ("a", "b", "a"):
        (source / "data").write_text(content)
        for path in store.root.glob("ac/*/*"):
            os.utime(path, (STAMP, STAMP))
        builders = [COMMANDS.start("tests.builder", arguments, ROOT, os.environ) for _ in range(2)]
        while any(builder.poll() is None for builder in builders):
            collected += gc(store, max_bytes=0, unused_days=1).records
            time.sleep(0.01)  # leaves CPU time to the builders
        for builder in builders:
            with builder:
                _, text = builder.communicate()
            assert builder.returncode == 0, text
        assert verify(store).ok
    assert collected > 0
