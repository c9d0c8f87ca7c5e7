"""Tests of the rules about files that store, receipts and logs share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlcbuild.store import layout
from mlcbuild.store.stamp import STAMP


@pytest.mark.parametrize(
    ("variables", "root"),
    [
        ({"MLCBUILD_STORE": "/s", "XDG_CACHE_HOME": "/x"}, "/s"),
        ({"MLCBUILD_STORE": "~/s"}, "/home/ann/s"),
        ({"MLCBUILD_STORE": "s"}, "/here/s"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/mlcbuild"),
        ({"XDG_CACHE_HOME": "x"}, "/home/ann/.cache/mlcbuild"),
        ({}, "/home/ann/.cache/mlcbuild"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS keeps caches in another directory")
def test_the_place_of_a_store(variables: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert layout.default_root(variables) == root


def test_a_blob_is_as_written_while_size_stamp_and_kind_are(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"1234")
    assert not layout.is_as_written(path.stat(), 4), "it was just written"
    os.utime(path, (STAMP, STAMP))
    assert layout.is_as_written(path.stat(), 4) and not layout.is_as_written(path.stat(), 5)
    os.utime(path, ns=(STAMP * 10**9, STAMP * 10**9 + 1))
    assert not layout.is_as_written(path.stat(), 4), "a nanosecond later"
    os.utime(tmp_path, (STAMP, STAMP))
    assert not layout.is_as_written(tmp_path.stat(), tmp_path.stat().st_size), "a directory"


def test_many_blobs_are_as_written_by_the_same_rule(tmp_path: Path) -> None:
    area = tmp_path / "area"
    area.mkdir()
    for name, nanoseconds in (("good", 0), ("late", 1)):
        (area / name).write_bytes(b"1234")
        os.utime(area / name, ns=(STAMP * 10**9, STAMP * 10**9 + nanoseconds))
    os.utime(area, (STAMP, STAMP))
    size = area.stat().st_size
    cases = [(area / "good", 4), (area / "good", 5), (area, size), (area / "late", 4)]
    assert [layout.all_as_written([str(path)], [size]) for path, size in cases] == [True, False, False, False]
    assert [layout.is_as_written(path.stat(), size) for path, size in cases] == [True, False, False, False]
    assert not layout.all_as_written([str(area / "good"), str(area)], [4, size])
    assert layout.all_as_written([], [])
    with pytest.raises(ValueError, match="shorter"):
        layout.all_as_written([str(area / "good")], [])
    directory = os.open(area, os.O_RDONLY)
    assert layout.all_as_written([b"good"], [4], directory)
    with pytest.raises(FileNotFoundError):
        layout.all_as_written([b"none"], [4], directory)
    os.close(directory)


def test_the_use_of_a_record_is_noted_every_few_minutes(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.touch()
    for ago, is_noted in ((layout.USE_NOTED_NS // 2, True), (2 * layout.USE_NOTED_NS, False)):
        then = time.time_ns() - ago
        os.utime(path, ns=(then, then))
        assert layout.is_use_noted(then) is is_noted
        layout.note_use(str(path))
        assert (path.stat().st_mtime_ns == then) is is_noted
    layout.note_use(str(tmp_path / "gone"))


def test_logs_are_named_by_their_time_and_the_oldest_go(tmp_path: Path) -> None:
    paths = [
        Path(layout.write_log(str(tmp_path), 1e9 + number, 0.5, f'"number": {number}}}'))
        for number in range(layout.KEPT_LOGS + 2)
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:])
    document = json.loads(paths[-1].read_text())
    assert document == {"time": 1e9 + layout.KEPT_LOGS + 1, "seconds": 0.5, "number": layout.KEPT_LOGS + 1}


def test_it_imports_next_to_nothing() -> None:
    code = "import sys; old = set(sys.modules); import mlcbuild.store.layout; print(*set(sys.modules) - old)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in result.stdout.split() if name.startswith("mlcbuild")}
    assert ours == {"mlcbuild", "mlcbuild.store", "mlcbuild.store.layout", "mlcbuild.store.stamp"}
    assert not {"pathlib", "json", "dataclasses", "typing"} & set(result.stdout.split())


def test_what_is_written_replaces_what_somebody_has_put_there(tmp_path: Path) -> None:
    """Checks that a file is written in place of whatever is there: a link is not followed, and a named pipe
    does not block."""
    mine, place = tmp_path / "mine", tmp_path / "place"
    mine.write_text("mine")
    for make in (
        lambda: place.symlink_to(mine),
        lambda: os.mkfifo(place),
        lambda: place.write_text("longer"),
    ):
        make()
        with os.fdopen(layout.create(str(place)), "w") as file:
            file.write("text")
        assert place.read_text() == "text" and not place.is_symlink() and mine.read_text() == "mine"
        place.unlink()
    place.mkdir()
    with pytest.raises(OSError, match=r"directory|permitted"):
        layout.create(str(place))


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    """Checks that each thread writes a temporary file of its own: one that is renamed is always complete."""
    path, parts = str(tmp_path / "file"), [b"a" * 100_000, b"b" * 100_000]
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(layout.write, path, parts) for _ in range(64)]:
            done.result()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert Path(path).read_bytes() == b"".join(parts)


def test_old_logs_are_removed_beside_what_cannot_be(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "x"
    (runs / "000.json").mkdir(parents=True)
    for number in range(layout.KEPT_LOGS + 3):
        written = layout.write_log(str(runs), 1e9 + number, 1.0, '"rest": ""}')
    names = {path.name for path in runs.iterdir()}
    assert "000.json" in names and Path(written).name in names
    assert len(names) == layout.KEPT_LOGS + 1
