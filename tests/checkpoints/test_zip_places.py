"""Tests of finding members in zip files, compared with Python's zipfile, also in damaged files."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from pathlib import Path

import pytest

from mlcbuild.checkpoints import zip_places
from mlcbuild.checkpoints.zip_places import ZipError, members, place

CONTENT = {"archive/data.pkl": b"pickle", "archive/data/0": bytes(range(256)), "archive/ü": b""}


def archive(comment: bytes = b"", method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as target:
        for name, data in CONTENT.items():
            target.writestr(name, data)
        target.comment = comment
    return file.getvalue()


def content(data: bytes) -> dict[str, bytes]:
    file = io.BytesIO(data)
    entries = members(file)
    places = {name: place(file, entries, name) for name in entries}
    return {name: data[start : start + size] for name, (start, size) in places.items()}


@pytest.mark.parametrize("comment", [b"", b"a comment", b"x" * 0xFFFF])
def test_members_lie_where_zipfile_reads_them(comment: bytes) -> None:
    assert content(archive(comment)) == CONTENT


def test_members_of_streams_and_zip64_are_found() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name, data in CONTENT.items():
            with target.open(name, "w", force_zip64=True) as member:
                member.write(data)
    assert content(file.getvalue()) == CONTENT


def test_a_file_of_many_members_has_wide_numbers() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for number in range(0x10001):
            target.writestr(zipfile.ZipInfo(str(number)), b"")
    data = file.getvalue()
    assert zip_places._END64 in data
    assert len(members(io.BytesIO(data))) == 0x10001


def test_compressed_and_missing_members_are_refused() -> None:
    file = io.BytesIO(archive(method=zipfile.ZIP_DEFLATED))
    entries = members(file)
    with pytest.raises(ZipError, match="its member 'archive/data/0' is compressed or encrypted"):
        place(file, entries, "archive/data/0")
    with pytest.raises(ZipError, match="it lacks its member 'other'"):
        place(file, entries, "other")


def test_two_members_of_one_name_are_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target, pytest.warns(UserWarning, match="Duplicate name"):
        target.writestr("a", b"1")
        target.writestr("a", b"2")
    with pytest.raises(ZipError, match="two of its members have the same name"):
        members(file)


def changed(data: bytes, at: int, form: str, value: int) -> bytes:
    """Returns a zip file in which one number of the end record is replaced. at: offset from the beginning of
    the record; form: struct format of the number."""
    edited = bytearray(data)
    struct.pack_into(form, edited, len(data) - 22 + at, value)
    return bytes(edited)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it has no end record, so it is truncated or no zip file"),
        (archive()[:-1], "it has no end record, so it is truncated or no zip file"),
        (changed(archive(), 10, "<H", 60000), "its end record contradicts the file"),
        (changed(archive(), 12, "<I", 1 << 30), "its end record contradicts the file"),
        (changed(archive(), 16, "<I", 1 << 30), "its end record contradicts the file"),
        (changed(archive(), 16, "<I", 7), "its central directory is damaged"),
        (changed(archive(), 10, "<H", 0xFFFF), "its end record lacks the zip64 record that it names"),
    ],
    ids=[*"abcdefg"],  # the bytes hold the time, which differs between the processes that test
)
def test_damage_is_named(data: bytes, words: str) -> None:
    with pytest.raises(ZipError) as caught:
        members(io.BytesIO(data))
    assert str(caught.value) == words


def test_a_large_central_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_places, "LARGEST_DIRECTORY", 100)
    with pytest.raises(ZipError, match=r"its central directory has \d+ bytes, and at most 100 are read"):
        members(io.BytesIO(archive()))


def test_flipped_bytes_are_refused_or_stay_within_the_file(tmp_path: Path) -> None:
    source, whole = random.Random(3), archive()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.choice((0, 1, 0x7F, 0xFF, source.randrange(256)))
        file = io.BytesIO(data)
        try:
            entries = members(file)
        except ZipError:
            continue
        for name in entries:
            try:
                start, size = place(file, entries, name)
            except ZipError:
                continue
            assert 0 <= start <= start + size <= len(data)
