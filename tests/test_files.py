"""Tests of reading untrusted files of a bundle: regular files only, up to a size, and exactly those that the
manifest lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3
from mlcbuild_format import files
from mlcbuild_format.errors import BundleError


def refusal(function: object, *arguments: object) -> str:
    with pytest.raises(BundleError) as caught:
        function(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    assert refusal(files.read_bytes, path, 9) == f"{path}: missing; copy the bundle again"
    path.mkdir()
    assert refusal(files.read_bytes, path, 9) == f"{path}: not a regular file; copy the bundle again"
    path.rmdir()
    os.mkfifo(path)
    assert refusal(files.open_regular, path) == f"{path}: not a regular file; copy the bundle again"
    path.unlink()
    path.write_bytes(b"0123456789")
    assert files.read_bytes(path, 10) == b"0123456789"
    assert refusal(files.read_bytes, path, 9) == f"{path}: has more than 9 bytes, which such a file never has"


def test_texts_and_documents(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_bytes('{"a": "é"}'.encode())
    assert files.read_text(path, 99) == '{"a": "é"}' and files.read_json(path, 99) == {"a": "é"}
    for data, words in (
        (b"a\xff", "not UTF-8: invalid start byte at byte 1"),
        (b'{"a": 1', "not valid JSON: "),
        (b'{"a": 1, "a": 2}', "not valid JSON: "),
        (b"[1]", "must hold a JSON object"),
    ):
        path.write_bytes(data)
        function = files.read_text if b"\xff" in data else files.read_json
        assert refusal(function, path, 99).startswith(f"{path}: {words}")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 5])
def test_the_digest_is_that_of_the_whole_file(size: int, tmp_path: Path) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "weights").write_bytes(data[:size])
    assert files.digest(tmp_path / "weights") == blake3(data[:size]).hexdigest()


def test_a_bundle_is_exactly_its_listing(tmp_path: Path) -> None:
    names = {"bundle.json", "tokenizer/tokenizer.json"}
    (tmp_path / "tokenizer").mkdir()
    for name in names:
        (tmp_path / name).touch()
    files.check_listing(tmp_path, names)
    unlisted = "and a bundle is exactly its manifest: remove it, or copy the bundle again"
    extra = tmp_path / "tokenizer" / "x"
    extra.touch()
    said = refusal(files.check_listing, tmp_path, names)
    assert said == f"{extra}: the manifest does not list this file, {unlisted}"
    extra.unlink()
    extra.mkdir()
    (extra / "below").touch()  # it is refused without being looked into
    said = refusal(files.check_listing, tmp_path, names)
    assert said == f"{extra}: the manifest does not list this directory, {unlisted}"
    (extra / "below").unlink()
    extra.rmdir()
    extra.symlink_to("tokenizer.json")
    said = refusal(files.check_listing, tmp_path, names)
    assert said == f"{extra}: is a symbolic link: copy what it points to in its place"
    extra.unlink()
    (tmp_path / "bundle.json").unlink()
    files.check_listing(tmp_path, names)  # what is missing is found when it is read
    (tmp_path / "bundle.json").mkdir()
    said = refusal(files.check_listing, tmp_path, names)
    assert said == f"{tmp_path / 'bundle.json'}: not a regular file; copy the bundle again"
