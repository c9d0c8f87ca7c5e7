"""Tests of headers of safetensors files: incomplete files are found without parsing, and damage is
described."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format import regular

from mlcbuild.checkpoints.headers import check_complete, read_header
from mlcbuild.errors import CheckpointError
from tests.checkpoint_files import save

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "model.safetensors"
    save(place, {"a": ("F16", np.zeros((3, 5), np.float16)), "b": ("BF16", np.zeros(7, np.uint16))})
    return place


def test_the_search_finds_a_file_complete_exactly_where_the_parser_does(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        part = tmp_path / f"{size}.safetensors"
        part.write_bytes(whole[:size])
        results = []
        for check in (read_header, check_complete):
            try:
                check(part)
                results.append(True)
            except CheckpointError:
                results.append(False)
        assert results == [size == len(whole)] * 2, size


def test_a_file_that_grows_is_examined_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"its header describes {len(whole)} bytes"):
        check_complete(path)
    path.write_bytes(whole)
    check_complete(path)
    monkeypatch.setattr(regular, "open_file", lambda path: pytest.fail("it was examined before"))
    check_complete(path)


@pytest.mark.parametrize("check", [read_header, check_complete])
def test_what_is_no_weights_file_is_described(check: Callable[[Path], object], path: Path) -> None:
    path.write_bytes(POINTER)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, not the weights; run 'git lfs pull'"):
        check(path)
    path.write_bytes(b"abc")
    with pytest.raises(
        CheckpointError, match=r"damaged or not .* \(3 bytes; .*3 bytes do not hold the header"
    ):
        check(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        check(path)
