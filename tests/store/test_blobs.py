"""Tests of single files of a store: linking them to other places, reading, condemning and replacing them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from mlcbuild.canon import Entry, bytes_digest
from mlcbuild.errors import LostBlobError, StoreError
from mlcbuild.store.blobs import Blobs, has_bytes, is_full, make_shelf, make_way, restamped
from mlcbuild.store.stamp import SPOILT, STAMP_NS

DATA = b"some bytes"
DIGEST = bytes_digest(DATA)
ENTRY = Entry("a/b.txt", DIGEST, len(DATA))


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    (tmp_path / "store" / "cas").mkdir(parents=True)
    return Blobs(tmp_path / "store")


def put(blobs: Blobs, data: bytes = DATA, digest: str = DIGEST) -> Path:
    part = blobs.root / "part"
    part.write_bytes(data)
    blobs.put_blob(digest, part)
    assert not part.exists() or blobs.holds(digest, len(data))
    return blobs.blob(digest)


def rot(path: Path) -> None:
    """Changes one byte of a file without changing its size and times."""
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"S" + path.read_bytes()[1:])
    path.chmod(0o444)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_blob_is_stamped_and_read_only(blobs: Blobs) -> None:
    path = put(blobs)
    assert path == blobs.root / "cas" / DIGEST[:2] / DIGEST and path.read_bytes() == DATA
    assert path.stat().st_mtime_ns == STAMP_NS and not path.stat().st_mode & 0o222
    assert blobs.holds(DIGEST, len(DATA)) and blobs.hold(DIGEST, len(DATA)) and blobs.sound(ENTRY)
    assert blobs.read_blob(ENTRY) == DATA


def test_holding_a_blob_renews_its_ctime_for_garbage_collection(blobs: Blobs) -> None:
    path = put(blobs)
    before = path.stat().st_ctime_ns
    time.sleep(0.02)  # longer than a tick of the file system's clock
    assert blobs.hold(DIGEST, len(DATA)) and path.stat().st_ctime_ns > before


def test_wrong_bytes_do_not_get_in(blobs: Blobs) -> None:
    with pytest.raises(StoreError, match=f"digest {DIGEST} has other content: it was refused"):
        put(blobs, b"other")
    assert not blobs.holds(DIGEST, 5) and not blobs.hold(DIGEST, len(DATA)) and not blobs.sound(ENTRY)


def test_files_are_linked_out(blobs: Blobs, tmp_path: Path) -> None:
    path = put(blobs)
    blobs.link_out([ENTRY, Entry("c", DIGEST, len(DATA))], tmp_path / "out")
    assert (tmp_path / "out" / "a" / "b.txt").samefile(path) and (tmp_path / "out" / "c").samefile(path)


def test_rotten_bytes_are_neither_read_nor_linked(blobs: Blobs, tmp_path: Path) -> None:
    rot(put(blobs))
    assert blobs.holds(DIGEST, len(DATA)) and not blobs.sound(ENTRY)
    with pytest.raises(LostBlobError, match=r"b.txt is damaged in the store.*; it was removed"):
        blobs.read_blob(ENTRY)
    assert not blobs.blob(DIGEST).exists()
    rot(put(blobs))
    with pytest.raises(LostBlobError, match="is damaged in the store"):
        blobs.link_out([ENTRY], tmp_path / "out")
    assert not blobs.blob(DIGEST).exists()


def test_a_missing_blob_is_named(blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(LostBlobError, match=f"the blob {DIGEST} of a/b.txt is gone; run again"):
        blobs.link_out([ENTRY], tmp_path / "out")
    with pytest.raises(LostBlobError, match=f"the blob {DIGEST} of a/b.txt cannot be read"):
        blobs.read_blob(ENTRY)


def test_links_of_a_condemned_blob_are_marked_unless_they_were_written_to(
    blobs: Blobs, tmp_path: Path
) -> None:
    link = tmp_path / "bundle"
    os.link(put(blobs), link)
    blobs.condemn(DIGEST)
    assert not blobs.blob(DIGEST).exists() and link.stat().st_mtime == SPOILT
    other = tmp_path / "written"
    os.link(put(blobs), other)
    os.utime(other, (77, 77))
    blobs.condemn(DIGEST)
    assert other.stat().st_mtime == 77


def test_a_correct_copy_replaces_what_is_there(blobs: Blobs) -> None:
    rot(put(blobs))
    assert put(blobs).read_bytes() == DATA
    blobs.blob(DIGEST).unlink()
    blobs.blob(DIGEST).mkdir()
    (blobs.blob(DIGEST) / "file").write_text("")
    assert put(blobs).read_bytes() == DATA


def test_an_equal_blob_stays(blobs: Blobs) -> None:
    before = put(blobs).stat().st_ino
    assert put(blobs).stat().st_ino == before


def test_a_copied_store_gets_its_times_back(blobs: Blobs) -> None:
    path = put(blobs)
    os.utime(path, (5, 5))
    assert blobs.holds(DIGEST, len(DATA)) and path.stat().st_mtime_ns == STAMP_NS
    os.utime(path, (5, 5))
    assert not restamped(path, DIGEST, 3) and not restamped(path, "0" * 64, len(DATA))
    assert path.stat().st_mtime == 5


def test_only_regular_files_have_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "link").symlink_to("file")
    assert has_bytes(tmp_path / "file", DIGEST, len(DATA))
    assert not has_bytes(tmp_path / "link", DIGEST, len(DATA))
    assert not has_bytes(tmp_path / "file", DIGEST, 3)


def test_directories_make_way(tmp_path: Path) -> None:
    (tmp_path / "shelf").write_text("")
    make_shelf(tmp_path / "shelf")
    make_shelf(tmp_path / "shelf")
    assert (tmp_path / "shelf").is_dir()
    (tmp_path / "link").symlink_to("shelf")
    make_way(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "shelf").is_dir()
    make_way(tmp_path / "shelf")
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space is left; free some"),
        (errno.EDQUOT, "no space is left; free some"),
        (errno.EEXIST, "File exists: /x; move it away"),
        (errno.EACCES, "Permission denied; make it writable"),
    ],
)
def test_errors_of_the_system_have_a_remedy(blobs: Blobs, code: int, words: str) -> None:
    error = OSError(code, os.strerror(code), "/x")
    with pytest.raises(StoreError, match=words), blobs.writing():
        raise error
    assert is_full(error) == (code in (errno.ENOSPC, errno.EDQUOT))
