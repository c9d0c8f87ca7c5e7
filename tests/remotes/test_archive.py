"""Tests of archives for machines without a network: what they hold, and which ones are refused."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild import keyfile
from mlcbuild.canon import bytes_digest
from mlcbuild.errors import StoreError, UsageError
from mlcbuild.remotes import archive
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.conftest import mlcbuild
from tests.remotes.users import REUSED, User, by_name, statuses


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    user = User(tmp_path / "source")
    records = [actual.record for actual in user.run().steps if actual.record is not None]
    path = tmp_path / "cache.tar"
    moved = archive.write(user.store, records, path)
    assert (moved.records, moved.blobs) == (3, 3)
    return path


def test_an_archive_makes_another_store_know_everything(exported: Path, tmp_path: Path) -> None:
    there = Store(tmp_path / "there")
    moved = archive.read(there, exported)
    assert (moved.records, moved.blobs) == (3, 3)
    assert statuses(User(there.root).run()) == REUSED
    assert verify(there).ok and not any((there.root / "tmp").iterdir())
    assert archive.read(there, exported) == moved, "twice does no harm"
    with tarfile.open(exported) as tar:
        assert all(member.isreg() for member in tar)


def test_a_record_that_occurs_twice_is_written_once(tmp_path: Path) -> None:
    user = User(tmp_path / "source")
    record = by_name(user.run())["a"].record
    assert record is not None
    moved = archive.write(user.store, [record, record], tmp_path / "x.tar")
    assert (moved.records, moved.blobs) == (1, 1)
    assert archive.read(Store(tmp_path / "there"), tmp_path / "x.tar") == moved


def members(path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(path) as tar:
        results = []
        for member in tar:
            file = tar.extractfile(member)
            results.append((member, file.read() if file is not None else b""))
        return results


def link(kind: bytes, name: str = "cas/" + "0" * 64) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member, b""


def named(name: str, data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member, data


EVIL = {
    "traversal": (named("../../etc/evil"), "it holds a member called '../../etc/evil'"),
    "absolute": (named("/etc/evil"), "it holds a member called '/etc/evil'"),
    "odd digest": (named("cas/" + "Z" * 64), "it holds a member called 'cas/ZZZ"),
    "symlink": (link(tarfile.SYMTYPE), "is a symbolic link: only regular files are taken"),
    "hard link": (link(tarfile.LNKTYPE), "is a hard link: only regular files are taken"),
    "device": (link(tarfile.CHRTYPE), "is a device: only regular files are taken"),
    "block device": (link(tarfile.BLKTYPE), "is a device: only regular files are taken"),
    "pipe": (link(tarfile.FIFOTYPE), "is a pipe: only regular files are taken"),
    "directory": (link(tarfile.DIRTYPE), "is a directory: only regular files are taken"),
    "sparse": (link(tarfile.GNUTYPE_SPARSE), "is a sparse file: only regular files are taken"),
    "long name": (link(tarfile.GNUTYPE_LONGNAME), "is of the kind 'L': only regular files are taken"),
    "pax header": (link(tarfile.XHDTYPE), "is of the kind 'x': only regular files are taken"),
    "swapped blob": (named("cas/" + "0" * 64), f"the bytes of cas/{'0' * 64} are wrong"),
    "false record": (named("ac/" + "0" * 64), f"ac/{'0' * 64}: it is cut off"),
}


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_archive_is_refused_with_its_reason(name: str, exported: Path, tmp_path: Path) -> None:
    member, words = EVIL[name]
    write(exported, [*members(exported), member])
    there = Store(tmp_path / "there")
    with pytest.raises(UsageError) as caught:
        archive.read(there, exported)
    assert str(caught.value).startswith(f"{exported} is refused: ") and words in str(caught.value)
    assert verify(there).ok and not any((there.root / "tmp").iterdir())


def write(path: Path, content: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in content:
            if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE):
                assert tar.fileobj is not None
                tar.fileobj.write(member.tobuf(tarfile.GNU_FORMAT))
            else:
                tar.addfile(member, io.BytesIO(data))


def refused(path: Path, tmp_path: Path, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        archive.read(Store(tmp_path / "there"), path, **options)  # type: ignore[arg-type]
    assert verify(Store(tmp_path / "there")).ok
    return str(caught.value).removeprefix(f"{path} is refused: ")


def test_archives_of_another_shape_are_refused(exported: Path, tmp_path: Path) -> None:
    content = members(exported)
    key = keyfile.create(tmp_path / "key.pem")
    assert refused(exported, tmp_path, trust=[key.public]).endswith("not signed by a trusted key")
    write(exported, [*content, content[1]])
    assert refused(exported, tmp_path) == f"it holds {content[1][0].name} twice"
    write(exported, [content[0], *reversed(content[1:])])
    shutil.rmtree(tmp_path / "there")
    assert "comes before its files: text.txt is missing" in refused(exported, tmp_path)
    write(exported, content[1:])
    assert refused(exported, tmp_path) == "it is not an archive of format mlcbuild-archive/1"
    for data in (b"", b"hello", b"\0" * 1024):
        exported.write_bytes(data)
        assert refused(exported, tmp_path) in (
            "it is not an archive of format mlcbuild-archive/1",
            "it is cut off",
        )
    exported.write_bytes(b"x" * 2000)
    assert refused(exported, tmp_path) == "it is not a tar archive, or it is damaged"
    assert "cannot be read: No such file" in refused(tmp_path / "nowhere.tar", tmp_path)


def test_a_cut_archive_is_refused_wherever_it_was_cut(exported: Path, tmp_path: Path) -> None:
    whole = exported.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for length in (100, 512, 600, 1024, 1500, 2048, end - 600, end - 1):
        exported.write_bytes(whole[:length])
        refused(exported, tmp_path)


def test_sizes_that_are_lies_are_refused(exported: Path, tmp_path: Path) -> None:
    content = members(exported)
    for name, size, words in (
        ("cas/" + "1" * 64, 1 << 50, "bytes: more than the archive"),
        ("ac/" + "1" * 64, 1 << 40, "bytes: more than a record can"),
    ):
        member = tarfile.TarInfo(name)
        member.size = size
        write(exported, content)
        data = exported.read_bytes().rstrip(b"\0")
        data += b"\0" * (-len(data) % 512) + member.tobuf(tarfile.GNU_FORMAT)
        exported.write_bytes(data)
        assert words in refused(exported, tmp_path)


def test_a_small_archive_that_claims_much_writes_nothing(exported: Path, tmp_path: Path) -> None:
    """Checks that a small archive which claims 1 TB of zeros is refused before anything is written. It is a
    sparse file."""
    member = tarfile.TarInfo("cas/" + "1" * 64)
    member.size = 1 << 40
    write(exported, members(exported))
    data = exported.read_bytes().rstrip(b"\0")
    exported.write_bytes(data + b"\0" * (-len(data) % 512) + member.tobuf(tarfile.GNU_FORMAT))
    os.truncate(exported, exported.stat().st_size + (1 << 40) + 1024)
    if exported.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this filesystem has no holes")
    result = mlcbuild("cache", "import", exported, store=tmp_path / "there")
    assert result.returncode == 2 and result.stderr.endswith(
        f"cas/{'1' * 64} says that it has {1 << 40} bytes, which are not in the archive\n"
    )
    assert verify(Store(tmp_path / "there")).ok


def test_an_archive_with_small_holes_is_taken(exported: Path, tmp_path: Path) -> None:
    """Checks that an archive with blocks of zeros is imported from a sparse file, as `cp --sparse=always`
    writes it."""
    zeros = bytes(300_000)
    write(exported, [*members(exported), named(f"cas/{bytes_digest(zeros)}", zeros)])
    subprocess.run(["cp", "--sparse=always", exported, tmp_path / "sparse.tar"], check=True)
    assert archive.read(Store(tmp_path / "there"), tmp_path / "sparse.tar").blobs == 4


def test_more_than_fits_is_not_begun(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(StoreError, match="no space is left"):
        archive.read(Store(tmp_path / "there"), exported)
    assert not list((tmp_path / "there").rglob("*.part")) and verify(Store(tmp_path / "there")).blobs == 0


class FailingReader(io.BufferedReader):
    """A file of which one call of `read` fails, as on a damaged disk: the one with the index `failing`."""

    def __init__(self, descriptor: int, failing: int) -> None:
        super().__init__(io.FileIO(descriptor))
        self._calls_before = failing

    def read(self, size: int | None = -1, /) -> bytes:
        self._calls_before -= 1
        if self._calls_before == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


def test_an_archive_that_cannot_be_read_is_named(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a failure of any read, also while a blob is written to the store, is one of the archive."""
    for failing in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdopen", lambda descriptor, _, at=failing: FailingReader(descriptor, at))
            try:
                archive.read(Store(tmp_path / "there"), exported)
            except UsageError as error:
                reason = "it cannot be read: Input/output error; copy it from its source again"
                assert str(error) == f"{exported} is refused: {reason}"
            else:
                break
    assert 15 < failing < 99, "every read has failed once"
    assert verify(Store(tmp_path / "there")).ok


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_archive(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "x.tar")
    with pytest.raises(UsageError, match=r"x\.tar: (an archive is a regular file|cannot be read: Is a dir)"):
        archive.read(Store(tmp_path / "there"), tmp_path / "x.tar")
    with pytest.raises(UsageError, match=r"x\.tar: is not a regular file, which an archive replaces"):
        archive.write(Store(tmp_path / "here"), (), tmp_path / "x.tar")


def test_a_damaged_store_is_not_exported(tmp_path: Path) -> None:
    user = User(tmp_path / "one")
    record = by_name(user.run())["a"].record
    assert record is not None
    user.store.blob(record.rows[0][1]).unlink()
    with pytest.raises(StoreError, match=r"was not written: text\.txt is missing"):
        archive.write(user.store, [record], tmp_path / "x.tar")
    assert bytes_digest(b"A") == record.rows[0][1]
    assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".*.part"))
