"""Tests of shared caches whose files are damaged after they were written: a run builds the right bundle,
warns, and replaces the damaged files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage.places import RECORDS, Place, full_directory, other_kind, settled, write
from tests.damage.test_damaged_blobs import rot

EVERY = "MLCBUILD_TEST_EVERY" in os.environ


@pytest.fixture
def remote(place: Place) -> Path:
    """Returns a directory that holds all results of the recipe, and which the recipe names as a remote. The
    local store is empty."""
    shared = place.root / "shared"
    shared.mkdir()
    recipe = place.root / "recipe.yaml"
    recipe.write_text(
        recipe.read_text() + f"cache: {{remotes: [{{url: '{shared.as_uri()}', mode: readwrite}}]}}\n"
    )
    result = place.mlcbuild("cache", "push", "recipe.yaml", shared.as_uri())
    assert result.returncode == 0, result.stderr
    return shared


def empty(place: Place) -> None:
    for directory in (place.store, place.root / "dist"):
        shutil.rmtree(directory)


def mended(place: Place, sound: Place) -> None:
    """Asserts that the bundles in `place` equal those of the undamaged copy `sound` except for provenance
    files, that the store has no damage, and that another run builds nothing."""

    def products(of: Place) -> dict[str, bytes]:
        return {name: data for name, data in of.bundles().items() if "provenance" not in name}

    actual, expected = products(place), products(sound)
    wrong = [name for name in {**actual, **expected} if actual.get(name) != expected.get(name)]
    assert not wrong, wrong
    settled(place)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    write(one, second)
    write(other, first)


BLOBS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": rot,
    "one byte less": lambda path: write(path, path.read_bytes()[:-1]),
    "one byte more": lambda path: write(path, path.read_bytes() + b"x"),
    "empty": lambda path: write(path, b""),
    "zeros": lambda path: write(path, bytes(path.stat().st_size)),
    "gone": Path.unlink,
    "a pipe": other_kind(os.mkfifo),
    "a link to a device": other_kind(lambda path: path.symlink_to("/dev/zero")),
}


ROTTEN = ("a flipped bit in a name", "zeros", "cut in the second line", "one line", "a pipe", "brackets")


@pytest.mark.parametrize("how", BLOBS if EVERY else ["a flipped bit", "one byte less", "one byte more"])
def test_a_rotten_blob_costs_a_warning_and_its_step(
    how: str, place: Place, sound: Place, remote: Path
) -> None:
    name = place.blob("weights/").name
    empty(place)
    BLOBS[how](remote / "cas" / name)
    result = place.run()
    said = result.stdout + result.stderr
    assert result.returncode == 0 and " built" in result.stdout and "0 built" not in result.stdout, said
    assert how == "gone" or f"(blob {name}) is refused: " in said, said
    mended(place, sound)


def test_a_directory_in_place_of_a_blob_is_left_to_its_owner(place: Place, remote: Path) -> None:
    name = place.blob("weights/").name
    empty(place)
    other_kind(full_directory)(remote / "cas" / name)
    assert place.run().returncode == 0
    again = place.mlcbuild("run", "recipe.yaml")
    assert again.returncode == 0 and "0 built, 11 reused" in again.stdout
    assert "is not written to in this run: it cannot be written: Is a directory" in again.stdout
    assert (remote / "cas" / name / "deep" / "file").exists()


@pytest.mark.parametrize("how", ROTTEN if EVERY else ROTTEN[:2])
def test_a_rotten_record_costs_a_warning_and_its_step(
    how: str, place: Place, sound: Place, remote: Path
) -> None:
    name = place.records("weights/")[0].name
    empty(place)
    RECORDS[how](remote / "ac" / name)
    result = place.run()
    said = result.stdout + result.stderr
    assert result.returncode == 0 and " built" in result.stdout and "0 built" not in result.stdout, said
    assert f"the record {name} is refused: " in said, said
    mended(place, sound)


@pytest.mark.parametrize("kind", ["weights/", "bundle/"])
def test_swapped_records_give_no_other_bundle(kind: str, place: Place, sound: Place, remote: Path) -> None:
    one, other = (record.name for record in place.records(kind))
    empty(place)
    swap(remote / "ac" / one, remote / "ac" / other)
    result = place.run()
    assert result.returncode == 0 and "2 built" in result.stdout, result.stdout + result.stderr
    assert "its key does not follow" in result.stderr + result.stdout
    mended(place, sound)


def test_what_one_user_mends_the_next_one_fetches(place: Place, sound: Place, remote: Path) -> None:
    """Damages all files of a shared cache. Checks that the next run with an empty store builds everything
    again, and that a run with another empty store builds nothing after these results were pushed to the
    cache."""
    empty(place)
    for path in (*(remote / "cas").iterdir(), *(remote / "ac").iterdir()):
        rot(path)
    first = place.run()
    assert first.returncode == 0 and "11 built, 0 reused" in first.stdout, first.stdout + first.stderr
    assert place.mlcbuild("cache", "push", "recipe.yaml", remote.as_uri()).returncode == 0
    empty(place)
    second = place.run()
    assert second.returncode == 0 and "0 built, 11 reused" in second.stdout, second.stdout + second.stderr
    mended(place, sound)
