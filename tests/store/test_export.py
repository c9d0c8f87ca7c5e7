"""Tests of exporting artifacts to directories: they are complete or absent, consist of links, and never
replace a user's file."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Step
from mlcbuild.errors import MlcbuildError, StoreError, UsageError
from mlcbuild.store.export import materialise
from mlcbuild.store.locks import HeldLock, wait_lock
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def made(store: Store, files: dict[str, str]) -> Record:
    graph = Graph([Step("b", "tests.actions:files", {"files": dict(files)}, {})])
    record = execute(graph, store, Options(executor="inline")).steps[0].record
    assert record is not None
    return record


def tree(path: Path) -> dict[str, str]:
    return {p.relative_to(path).as_posix(): p.read_text() for p in path.rglob("*") if p.is_file()}


def test_the_files_are_there_as_read_only_links_and_a_second_time_nothing_is_done(
    store: Store, tmp_path: Path
) -> None:
    record = made(store, {"a.txt": "1", "lib/b": "2"})
    out = tmp_path / "dist" / "tiny"
    assert materialise(store, record, out) is True
    assert tree(out) == {"a.txt": "1", "lib/b": "2"}
    assert (out / "lib" / "b").samefile(store.blob(record.files[1].digest))
    assert (out / "a.txt").stat().st_mode & 0o777 == 0o444
    inode = out.stat().st_ino
    assert materialise(store, record, out) is False
    assert out.stat().st_ino == inode
    assert sorted(path.name for path in out.parent.iterdir()) == [".tiny.mlcbuild.json", "tiny"]
    assert not any((store.root / "locks").iterdir())


def test_an_older_export_is_replaced_whole(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    materialise(store, made(store, {"a": "1", "gone/x": "2"}), out)
    assert materialise(store, made(store, {"a": "3", "new": "4"}), out)
    assert tree(out) == {"a": "3", "new": "4"}
    (out / "a").unlink()
    assert materialise(store, made(store, {"a": "3", "new": "4"}), out)  # a missing file is put back
    assert tree(out) == {"a": "3", "new": "4"}


def refused(store: Store, out: Path, name: str) -> None:
    before = tree(out)
    with pytest.raises(UsageError) as caught:
        materialise(store, made(store, {"other": "9"}), out)
    assert str(caught.value) == (
        f"{out} holds files that were not written by mlcbuild, or were changed since: {name}; "
        "move them away, or choose another output"
    )
    assert tree(out) == before


def test_files_of_the_user_are_never_lost(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    refused(store, out, "thesis.txt")
    (out / "thesis.txt").unlink()
    materialise(store, made(store, {"a": "1", "b": "2"}), out)  # an empty directory is no loss
    (out / "notes.txt").write_text("mine")
    refused(store, out, "notes.txt")
    (out / "notes.txt").unlink()
    (out / "mine").mkdir()
    refused(store, out, "mine")
    (out / "mine").rmdir()
    (out / "a").unlink()
    (out / "a").write_text("9")  # same name and size
    refused(store, out, "a")
    (out / "a").unlink()
    (out / "a").symlink_to("b")
    refused(store, out, "a")
    (out / "a").unlink()
    for number in range(5):
        (out / f"m{number}").write_text("")
    refused(store, out, "m0, m1, m2 and 2 more")


def test_a_directory_of_the_same_name_made_later_is_the_users(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    materialise(store, made(store, {"a": "1"}), out)
    out.rename(tmp_path / "kept")
    out.mkdir()
    (out / "a").write_text("2")
    refused(store, out, "a")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_destination_that_is_no_directory_is_refused(store: Store, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="out is not a directory: move it away, or choose another output"):
        materialise(store, made(store, {"a": "1"}), out)


def test_what_a_killed_export_left_is_removed(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = made(store, {"a": "1"}), made(store, {"a": "2"})
    materialise(store, first, out)
    # Killed after the old directory was set aside: the new one stands ready beside it.
    (tmp_path / ".out.mlcbuild.new").mkdir()
    (tmp_path / ".out.mlcbuild.new" / "half").write_text("")
    out.rename(tmp_path / ".out.mlcbuild.old")
    materialise(store, second, out)
    assert tree(out) == {"a": "2"}
    assert not list(tmp_path.glob(".out.mlcbuild.[no]*"))


def test_a_changed_bundle_is_noticed_before_the_store_gives_it_out_again(
    store: Store, tmp_path: Path
) -> None:
    record = made(store, {"a": "1"})
    out = tmp_path / "out"
    materialise(store, record, out)
    (out / "a").chmod(0o644)
    (out / "a").write_text("2")  # through the hard link: the blob is changed as well
    with pytest.raises(StoreError, match="a is damaged in the store; run again to build it anew"):
        materialise(store, record, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert made(store, {"a": "1"}) == record
    assert materialise(store, record, tmp_path / "other")
    assert tree(tmp_path / "other") == {"a": "1"}


def test_on_another_filesystem_files_are_copied(store: Store, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem here")
    out = memory / f"mlcbuild-test-{os.getpid()}" / "out"
    try:
        record = made(store, {"a": "1", "b/c": "2"})
        assert materialise(store, record, out)
        assert tree(out) == {"a": "1", "b/c": "2"}
        assert (out / "a").stat().st_mode & 0o777 == 0o444
        assert materialise(store, record, out) is False
        assert materialise(store, made(store, {"a": "3"}), out)
    finally:
        subprocess.run(["rm", "-rf", out.parent], check=True)


def test_a_full_disk_keeps_nothing_of_what_did_not_fit(store: Store, tmp_path: Path) -> None:
    """Limits the size of files to 100 kB for this process, so that writing more fails as on a full disk."""
    first, second = made(store, {"a": "1"}), made(store, {"a": "2"})
    out = tmp_path / "dist" / "out"
    assert materialise(store, first, out)
    before = sorted(path.name for path in out.parent.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(MlcbuildError, match="out cannot be written: File too large"):
            materialise(store, second, out, {"large": bytes(200_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in out.parent.iterdir()) == before
    assert tree(out) == {"a": "1"}
    assert materialise(store, second, out, {"large": b"0"})
    assert tree(out) == {"a": "2", "large": "0"}


def test_a_destination_that_cannot_be_made_is_told(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MlcbuildError, match="file/out cannot be written: Not a directory"):
        materialise(store, made(store, {"a": "1"}), tmp_path / "file" / "out")


def exchange(first: Path, second: Path) -> None:
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)


@pytest.mark.parametrize("linked", [True, False])
def test_exchanged_files_of_one_size_are_written_again(
    store: Store, tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks files that differ in their bytes only, in two directories and in one."""
    if not linked:
        monkeypatch.setattr(os, "link", missing_links)
    records = [made(store, {"a": "1", "b": "2"}), made(store, {"a": "3", "b": "4"})]
    outs = [tmp_path / "first", tmp_path / "second"]

    def write() -> list[bool]:
        return [materialise(store, record, out) for record, out in zip(records, outs, strict=True)]

    assert write() == [True, True]
    for first, second in (
        (outs[0] / "a", outs[1] / "a"),
        (outs[0] / "a", outs[0] / "b"),
        (outs[0], outs[1]),
    ):
        exchange(first, second)
        assert True in write()
        assert [tree(out) for out in outs] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
        assert write() == [False, False]


def missing_links(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "no links here")


@pytest.mark.parametrize("linked", [True, False])
def test_a_list_without_inodes_is_completed(
    store: Store, tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:
        monkeypatch.setattr(os, "link", missing_links)
    record, out = made(store, {"a": "1", "b": "2"}), tmp_path / "out"
    materialise(store, record, out)
    marker = out.with_name(".out.mlcbuild.json")
    whole = marker.read_bytes()
    document = json.loads(whole)
    del document["inodes"]
    marker.write_text(json.dumps(document))
    assert materialise(store, record, out) is False
    assert marker.read_bytes() == whole


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DIFFERENT: dict[str, Callable[[Path], object]] = {
    "a file more": lambda out: (out / "mine").touch(),
    "a directory more": lambda out: (out / "empty").mkdir(),
    "a file less": lambda out: (out / "lib" / "b").unlink(),
    "a directory less": lambda out: shutil.rmtree(out / "lib"),
    "a directory for a file": lambda out: directory(out / "a"),
    "a link to a file": lambda out: link(out / "a"),
    "a link to a directory": lambda out: link(out / "lib"),
    "a link": link,
    "another time": lambda out: os.utime(out / "a"),
    "no list": lambda out: out.with_name(f".{out.name}.mlcbuild.json").unlink(),
    "a list of more": lambda out: out.with_name(f".{out.name}.mlcbuild.json").write_text('{"files": []}'),
    "no list at all": lambda out: out.with_name(f".{out.name}.mlcbuild.json").write_text("[]"),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_only_what_stands_whole_is_left_without_a_lock(
    store: Store, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = made(store, {"a": "A", "lib/b": "B", "lib/c": "C"})
    out = tmp_path / "out"
    assert materialise(store, record, out)
    locks: list[Path] = []

    def waited(path: Path) -> HeldLock:
        locks.append(path)
        return wait_lock(path)

    monkeypatch.setattr("mlcbuild.store.export.wait_lock", waited)
    assert not materialise(store, record, out) and not locks
    DIFFERENT[what](out)
    with suppress(UsageError):
        materialise(store, record, out)
    assert locks
