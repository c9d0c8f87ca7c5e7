"""Tests of damage in a store outside of its records and blobs: files of other kinds, links, permissions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.store.staging import remove
from tests.damage.places import Place, bound, full_directory, healed, other_kind


def around(place: Place) -> Path:
    mine = place.root / "mine"
    mine.mkdir(mode=0o700)
    (mine / "inner").mkdir(mode=0o700)
    for name in ("tmp", "locks"):
        directory = place.store / name
        (directory / "file").write_bytes(b"\xff" * 100)
        (directory / "empty").mkdir()
        os.mkfifo(directory / "pipe")
        os.mkfifo(directory / "pipe.lock")
        (directory / "directory.lock").mkdir()
        (directory / "full").mkdir()
        (directory / "full" / "x").write_text("x")
        (directory / "link").symlink_to(mine)
        (directory / "link.lock").symlink_to(mine)
    return mine


def test_junk_in_tmp_and_locks_is_no_obstacle(place: Place, sound: Place) -> None:
    mine = around(place)
    place.blob("weights/").unlink()
    shutil.rmtree(place.root / "dist")
    result = place.apart.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list((place.store / "tmp").iterdir())
    assert (mine / "inner").stat().st_mode & 0o777 == 0o700, "what a link names is not touched"
    healed(place, sound)


AROUND: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the lock is a directory": ("lock", Path.mkdir),
    "the lock is a pipe": ("lock", os.mkfifo),
    "the lock is a link": ("lock", lambda path: path.symlink_to("/nowhere/at/all")),
    "the index is a directory": ("index.sqlite", full_directory),
    "the index is a pipe": ("index.sqlite", os.mkfifo),
    "the index is text": ("index.sqlite", lambda path: path.write_text("text" * 5000)),
    "the receipts are a file": ("receipts", lambda path: path.write_text("")),
    "the logs of runs are a file": ("runs", lambda path: path.write_text("")),
}


@pytest.mark.parametrize("what", AROUND)
def test_other_files_of_a_store_are_done_without(what: str, place: Place, sound: Place) -> None:
    name, make = AROUND[what]
    remove(place.store / name)
    make(place.store / name)
    place.blob("weights/").unlink()
    shutil.rmtree(place.root / "dist")
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    healed(place, sound)


LINKED = ("tmp", "locks", "logs", "known", "partial", "unsent", "sent", "receipts", "runs")
"""Names of the directories of a store from which mlcbuild removes files."""


OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a directory": lambda path, mine: path.symlink_to(mine),
    "a link to a file": lambda path, mine: path.symlink_to(mine / "old.lock"),
    "a link to nothing": lambda path, mine: path.symlink_to(mine / "nothing"),
    "a link to a device": lambda path, mine: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, mine: os.mkfifo(path),
    "a socket": lambda path, mine: bound(path),
    "a file": lambda path, mine: path.write_text("text"),
}


def files_of_somebody(place: Place) -> Path:
    """Returns a directory outside of the store with files such as mlcbuild would remove from its own
    directories, if it followed a link to this one."""
    mine = place.root / "mine"
    mine.mkdir()
    for name in ("old.lock", "a.json", "b.rest", "0" * 64, "note.txt"):
        (mine / name).write_text(f"mine: {name}")
        os.utime(mine / name, (1_000_000, 1_000_000))
    for number in range(40):
        (mine / f"{number}.json").write_text("{}")
    (mine / "inner").mkdir()
    (mine / "inner" / "x.log").write_text("mine")
    os.utime(mine / "inner" / "x.log", (1_000_000, 1_000_000))
    return mine


def state(directory: Path) -> dict[str, tuple[str, int]]:
    return {
        path.relative_to(directory).as_posix(): (path.read_text(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(LINKED)
        for at, kind in enumerate(OTHERS)
        if "MLCBUILD_TEST_EVERY" in os.environ or (number, at) in ((0, 0), (1, 0), (2, 4), (7, 1), (8, 0))
    ],
)
def test_directories_of_a_store_are_its_own(name: str, kind: str, place: Place, sound: Place) -> None:
    """Checks that a link or another kind of file in place of a store's directory does not make a command
    hang, that no foreign file is removed or written, and that the store is repaired."""
    mine = files_of_somebody(place)
    before = state(mine)
    remove(place.store / name)
    OTHERS[kind](place.store / name, mine)
    place.blob("weights/").unlink()
    shutil.rmtree(place.root / "dist")
    collected = place.mlcbuild("cache", "gc", "--unused-days", "9999")
    assert collected.returncode == 0, collected.stderr
    assert state(mine) == before
    remove(place.store / name)
    OTHERS[kind](place.store / name, mine)
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    again = place.mlcbuild("run", "recipe.yaml")  # writes a receipt and a log
    assert again.returncode == 0 and place.mlcbuild("run", "recipe.yaml").returncode == 0
    healed(place, sound)
    assert state(mine) == before
    there = place.store / name
    assert not there.is_symlink() and (there.is_dir() or not there.exists())


@pytest.mark.parametrize("name", ["ac", "cas"])
def test_records_and_blobs_that_are_a_link_are_refused(name: str, place: Place) -> None:
    """Checks that a link in place of the directory of records or of blobs is refused: `gc` and `verify` would
    remove foreign files behind it."""
    mine = files_of_somebody(place)
    before = state(mine)
    shutil.rmtree(place.root / "dist")
    shutil.move(place.store / name, place.root / "away")
    (place.store / name).symlink_to(mine)
    for words in (("cache", "gc", "--unused-days", "9"), ("cache", "verify"), ("run", "recipe.yaml")):
        result = place.mlcbuild(*words)
        assert result.returncode in (1, 3), words
        assert f"{name} is a symbolic link: move the whole store instead" in result.stdout + result.stderr
    assert state(mine) == before


def test_links_below_the_logs_and_at_the_index_are_not_followed(place: Place, sound: Place) -> None:
    mine = files_of_somebody(place)
    before = state(mine)
    for each in [*(place.store / "logs").iterdir(), *(place.store / "runs").iterdir()]:
        remove(each)
        each.symlink_to(mine)
    for suffix in ("", "-wal", "-shm"):
        index = place.store / f"index.sqlite{suffix}"
        remove(index)
        index.symlink_to(mine / f"nothing{suffix}")
    place.blob("weights/").unlink()
    shutil.rmtree(place.root / "dist")
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert state(mine) == before and not (mine / "nothing").exists()
    assert place.mlcbuild("cache", "gc", "--unused-days", "1").returncode == 0
    assert state(mine) == before
    healed(place.apart, sound)


LOGS: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "no object": lambda path: path.write_text('"text"'),
    "odd types": lambda path: path.write_text(path.read_text().replace("[", "[7, ")),
    "an impossible time": lambda path: path.write_text(path.read_text().replace('"time": 1', '"time": 1e99')),
    "not a number": lambda path: path.write_text(
        path.read_text().replace('"seconds": ', '"seconds": NaN, "x": ')
    ),
    "a pipe": other_kind(os.mkfifo),
}


@pytest.mark.parametrize("kind", ["json", "rest"])
@pytest.mark.parametrize("how", LOGS)
def test_a_damaged_log_of_a_run_is_done_without(how: str, kind: str, place: Place, sound: Place) -> None:
    for path in (place.store / "runs").rglob(f"*.{kind}"):
        LOGS[how](path)
    assert place.run().returncode == 0
    result = (place.apart if how == "deep" else place).mlcbuild("report", "recipe.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    healed(place, sound)


@pytest.mark.parametrize("name", ["ac", "cas"])
def test_a_shelf_that_is_a_file_is_replaced(name: str, place: Place, sound: Place) -> None:
    shelf = (place.records("weights/")[0] if name == "ac" else place.blob("weights/")).parent
    shutil.rmtree(shelf)
    shelf.write_text("x")
    shutil.rmtree(place.root / "dist")
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    healed(place, sound)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"[" * 100_000)])
def test_a_damaged_mark_of_the_store_is_named(make: Callable[[Path], object], place: Place) -> None:
    (place.store / "store.json").unlink()
    make(place.store / "store.json")
    result = place.mlcbuild("run", "recipe.yaml")
    assert result.returncode == 1 and f"{place.store}/store.json: " in result.stderr
    assert "MLCBUILD_STORE to another directory" in result.stderr


def test_a_store_may_be_a_link(place: Place, sound: Place) -> None:
    place.store.rename(place.root / "real")
    place.store.symlink_to("real")
    shutil.rmtree(place.root / "dist")
    assert "0 built, 11 reused" in place.run().stdout
    healed(place, sound)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"[" * 100_000)])
def test_a_damaged_list_beside_a_bundle_makes_its_files_the_users(
    make: Callable[[Path], object], place: Place, sound: Place
) -> None:
    for marker in (place.root / "dist").glob(".*.json"):
        marker.unlink()
        make(marker)
    result = place.run()
    assert result.returncode == 2 and "holds files that were not written by mlcbuild" in result.stdout
    shutil.rmtree(place.root / "dist")
    assert place.run().returncode == 0
    healed(place, sound)


def give_away(store: Path) -> None:
    """Makes the user with the id 65534 (nobody) the owner of all files of a store if this process runs as
    root; does nothing otherwise."""
    if os.geteuid() == 0:
        for path in (store, *store.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("closed", [(".",), ("ac",), ("cas",), ("tmp", "locks")])
def test_a_complete_store_that_cannot_be_written_gives_bundles(
    closed: tuple[str, ...], place: Place, sound: Place, reader: tuple[str, ...]
) -> None:
    shutil.rmtree(place.root / "dist")
    shutil.rmtree(place.store / "runs")
    before = {path: path.lstat().st_mtime_ns for path in place.store.rglob("*")}
    for top in closed:
        for path in (place.store / top, *(place.store / top).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    if closed == (".",):
        give_away(place.store)
    result = place.mlcbuild("run", "recipe.yaml", before=reader)
    assert result.returncode == 0 and "0 built, 11 reused" in result.stdout, result.stdout + result.stderr
    assert place.bundles() == sound.bundles()
    assert place.mlcbuild("run", "recipe.yaml", before=reader).returncode == 0
    if closed == (".",):
        assert {path: path.lstat().st_mtime_ns for path in place.store.rglob("*")} == before
        assert place.mlcbuild("cache", "verify", before=reader).returncode == 0
