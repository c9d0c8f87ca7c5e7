"""Tests of the ledgers that note what a remote has received: what they remember, and ledger files that cannot
be read or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.remotes.ledger import DIRECTORY, Ledger

URL = "https://cache.example/mlc"


def test_the_next_ledger_has_what_was_added(tmp_path: Path) -> None:
    first = Ledger(tmp_path, URL)
    for key in ("a" * 64, "b" * 64, "a" * 64):
        first.add(key)
    assert "a" * 64 not in first.keys, "keys are those of the beginning"
    second = Ledger(tmp_path, URL)
    second.add("b" * 64)
    second.add("c" * 64)
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert file.read_text() == "".join(f"{letter * 64}\n" for letter in "abc"), "each key once"
    assert {"a" * 64, "b" * 64} <= second.keys


def test_each_remote_has_its_own(tmp_path: Path) -> None:
    Ledger(tmp_path, URL).add("a" * 64)
    assert "a" * 64 not in Ledger(tmp_path, f"{URL}/other").keys


@pytest.mark.parametrize("damage", ["bytes", "directory"])
def test_a_ledger_that_cannot_be_read_is_empty(tmp_path: Path, damage: str) -> None:
    Ledger(tmp_path, URL).add("a" * 64)
    (file,) = (tmp_path / DIRECTORY).iterdir()
    if damage == "bytes":
        file.write_bytes(b"\xff\xfe")
    else:
        file.unlink()
        file.mkdir()
    ledger = Ledger(tmp_path, URL)
    assert not ledger.keys
    ledger.add("b" * 64)  # raises nothing, whether it can be written or not


def test_a_store_that_cannot_be_written_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).write_text("a file in place of the directory")
    Ledger(tmp_path, URL).add("a" * 64)
    assert (tmp_path / DIRECTORY).read_text() == "a file in place of the directory"
