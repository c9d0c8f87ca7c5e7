"""Tests of damaged records in a store: each counts as a cache miss with one warning, and never gives a wrong
bundle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage.places import RECORDS, Place, healed, lines, write


@pytest.mark.parametrize("how", RECORDS)
def test_a_damaged_record_is_a_miss_with_one_warning(how: str, place: Place, sound: Place) -> None:
    (record, *_) = place.records("weights/")
    RECORDS[how](record)
    place = place.apart if how in ("brackets", "a pipe") else place
    status = place.mlcbuild("cache", "status")
    assert status.returncode == 0 and "11 records" in status.stdout, status.stderr
    assert place.mlcbuild("plan", "recipe.yaml").returncode == 0
    shutil.rmtree(place.root / "dist")
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stdout + result.stderr).count("warning") == 1
    assert f"{record}: the record is not used: " in result.stdout and "1 built, 10 reused" in result.stdout
    healed(place, sound)


@pytest.mark.parametrize(
    "how", ["a third line", "a full directory", "a pipe", "a link to itself", "brackets"]
)
def test_a_damaged_record_is_removed_by_verify_and_gc(how: str, place: Place, sound: Place) -> None:
    (record, *_) = place.records("weights/")
    RECORDS[how](record)
    result = place.mlcbuild("cache", "verify")
    assert result.returncode == 1 and f"record {record.name} does not match its name" in result.stdout
    assert not os.path.lexists(record)
    RECORDS["a full directory"](place.records("bundle/")[0])
    assert "removed 1 records" in place.mlcbuild("cache", "gc", "--unused-days", "999").stdout
    assert place.run().returncode == 0
    healed(place, sound)


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    write(first, other)
    write(second, one)


def swap_first_lines(first: Path, second: Path) -> None:
    one, other = lines(first), lines(second)
    write(first, b"\n".join([other[0], *one[1:]]))
    write(second, b"\n".join([one[0], *other[1:]]))


@pytest.mark.parametrize("change", [swap, swap_first_lines])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bundle/m000-q4f16_1", "bundle/m000-q4a8_1"),
        ("weights/m000/q4f16_1", "weights/m000/q4a8_1"),
        ("verify/m000-q4f16_1", "verify/m000-q4a8_1"),
        ("bundle/m000-q4f16_1", "config/"),
        ("library/", "tokenizer/"),
    ],
)
def test_swapped_records_never_give_a_wrong_bundle(
    one: str, other: str, change: Callable[[Path, Path], None], place: Place, sound: Place
) -> None:
    change(place.records(one)[0], place.records(other)[0])
    shutil.rmtree(place.root / "dist")
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 built, 9 reused" in result.stdout and result.stdout.count("warning") == 2
    healed(place, sound)


def test_a_record_copied_under_the_key_of_another_is_a_miss(place: Place, sound: Place) -> None:
    first, second = place.records("bundle/")
    write(first, second.read_bytes())
    shutil.rmtree(place.root / "dist")
    assert "1 built, 10 reused" in place.run().stdout
    healed(place, sound)
