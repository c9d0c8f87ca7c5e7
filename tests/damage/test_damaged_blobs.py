"""Tests of damaged blobs in a store: they are built again, and never read, linked or sent."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.store.stamp import STAMP
from tests.damage.places import RECORDS, Place, full_directory, healed, other_kind, write


def rot(path: Path) -> None:
    """Flips one bit of a file without changing its size and times."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    write(path, bytes(data))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def elsewhere(path: Path) -> None:
    """Replaces a file by a symbolic link to a copy with the same bytes and modification time."""
    aside = path.parent.parent.parent.parent / "aside"
    shutil.copy2(path, aside)
    path.unlink()
    path.symlink_to(aside)
    os.utime(path, (STAMP, STAMP), follow_symlinks=False)


BLOBS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: write(path, b""),
    "shorter": lambda path: write(path, path.read_bytes()[:-1]),
    "other bytes, and a time of now": lambda path: write(path, path.read_bytes()[:-1] + b"?"),
    "a directory": other_kind(Path.mkdir),
    "a full directory": other_kind(full_directory),
    "a pipe": other_kind(os.mkfifo),
    "a link": elsewhere,
    "a link to a device": other_kind(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("how", BLOBS)
def test_a_damaged_blob_is_built_again(how: str, place: Place, sound: Place) -> None:
    blob = place.blob("weights/")
    shutil.rmtree(place.root / "dist")
    BLOBS[how](blob)
    assert place.mlcbuild("cache", "status").returncode == 0
    result = place.run()
    assert result.returncode == 0 and "1 built, 10 reused" in result.stdout, result.stdout + result.stderr
    healed(place, sound)


@pytest.mark.parametrize("how", ["a pipe", "a full directory", "a link to a device", "shorter"])
def test_verify_and_gc_remove_what_is_no_blob(how: str, place: Place, sound: Place) -> None:
    blob = place.blob("weights/")
    BLOBS[how](blob)
    (place.store / "cas" / "junk").write_text("x")
    (place.store / "cas" / "00").mkdir(exist_ok=True)
    os.mkfifo(place.store / "cas" / "00" / "pipe")
    result = place.mlcbuild("cache", "verify")
    assert result.returncode == 1 and f"blob {blob.name} (" in result.stdout
    assert "3 problems: what was damaged is removed" in result.stdout
    assert not os.path.lexists(blob)
    shutil.rmtree(place.root / "dist")
    assert place.run().returncode == 0
    healed(place, sound)


def test_verify_takes_rotten_bytes_out_and_a_run_mends_bundles_too(place: Place, sound: Place) -> None:
    blob = place.blob("weights/")
    (linked,) = (p for p in (place.root / "dist").rglob("weights*") if p.samefile(blob))
    rot(blob)
    result = place.apart.mlcbuild("cache", "verify")
    assert result.returncode == 1 and f"blob {blob.name} (" in result.stdout and not blob.exists()
    assert place.bundles() != sound.bundles(), "the bundle is a link to the damaged file"
    result = place.run()
    assert result.returncode == 0 and "1 built, 10 reused" in result.stdout, result.stdout + result.stderr
    assert linked.samefile(blob)
    healed(place, sound)


def test_a_forced_run_replaces_rotten_bytes(place: Place, sound: Place) -> None:
    rot(place.blob("weights/m000/q4f16_1"))
    result = place.run("--force", "weights/*")
    assert result.returncode == 0 and "2 built, 9 reused" in result.stdout, result.stdout + result.stderr
    healed(place, sound)


def test_rotten_bytes_are_not_put_into_a_bundle(place: Place, sound: Place) -> None:
    blob = place.blob("weights/")
    shutil.rmtree(place.root / "dist")
    rot(blob)
    result = place.run()
    assert result.returncode == 0 and "1 built, 10 reused" in result.stdout, result.stdout + result.stderr
    warning = f"warning {blob}: weights-00001-of-00001.safetensors is damaged in the store: "
    assert warning in result.stdout and "run again to build it anew; this is done now" in result.stdout
    healed(place, sound)


def test_a_bundle_that_the_first_attempt_wrote_is_reported_as_built(place: Place, sound: Place) -> None:
    shutil.rmtree(place.root / "dist")
    rot(place.blob("weights/m000/q4f16_1"))
    result = place.run("--force", "bundle/m000-q4a8_1*")
    assert result.returncode == 0 and "this is done now" in result.stdout
    bundles = [line.split()[0] for line in result.stdout.splitlines() if "  dist/" in line]
    assert bundles == ["built", "built"], result.stdout
    healed(place, sound)


@pytest.mark.parametrize("verify", [False, True])
def test_a_blob_that_rots_to_another_size_heals_in_bundles_too(
    verify: bool, place: Place, sound: Place
) -> None:
    blob = place.blob("weights/m000/q4f16_1")
    times, data = blob.stat(), blob.read_bytes()
    assert times.st_nlink > 1, "a bundle shares the file"
    write(blob, data + b"x")
    os.utime(blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    if verify:
        assert place.mlcbuild("cache", "verify").returncode == 1
    result = place.run()
    assert result.returncode == 0, result.stdout + result.stderr
    healed(place, sound)


def test_no_step_reads_rotten_bytes(place: Place, sound: Place) -> None:
    blob = place.blob("config/")
    rot(blob)
    result = place.run("--force", "weights/*")
    assert result.returncode == 0 and "3 built, 8 reused" in result.stdout, result.stdout + result.stderr
    assert f"warning {blob}: config.json is damaged in the store" in result.stdout
    healed(place, sound)


def test_damage_that_cannot_be_removed_fails_the_run(place: Place, sound: Place) -> None:
    blob = place.blob("config/")
    rot(blob)
    blob.parent.chmod(0o555)
    result = place.command("tests.product", "fill", "recipe.yaml", "--force", "weights/*")
    if os.access(blob.parent, os.W_OK):
        assert result.returncode == 0  # root may remove it nevertheless
    else:
        assert result.returncode == 1 and "it cannot be removed: make the store writable" in result.stdout
    blob.parent.chmod(0o755)
    assert place.run().returncode == 0
    healed(place, sound)


def test_rotten_manifests_and_figures_are_seen(place: Place, sound: Place) -> None:
    for step in ("verify/", "library/"):
        rot(place.blob(step))
    assert place.mlcbuild("plan", "recipe.yaml").returncode == 1
    result = place.run()
    assert result.returncode == 0, result.stdout
    assert place.mlcbuild("cache", "verify").returncode == 0
    healed(place, sound)


def test_what_a_user_wrote_through_a_bundle_is_not_lost(place: Place, sound: Place) -> None:
    blob = place.blob("weights/")
    (linked,) = (p for p in (place.root / "dist").rglob("weights*") if p.samefile(blob))
    mine = b"!" * blob.stat().st_size
    write(linked, mine)
    assert place.mlcbuild("cache", "verify").returncode == 1
    result = place.run()
    assert result.returncode == 2 and "were changed since: weights-00001" in result.stdout + result.stderr
    assert linked.read_bytes() == mine
    linked.parent.rename(place.root / "mine")
    assert place.run().returncode == 0
    healed(place, sound)


@pytest.mark.parametrize("what", ["blob", "record"])
def test_damage_is_neither_exported_nor_pushed(what: str, place: Place) -> None:
    blob, record = place.blob("weights/"), place.records("weights/")[0]
    bad = blob.read_bytes()[:-1] + bytes([blob.read_bytes()[-1] ^ 1])
    if what == "blob":
        rot(blob)
    else:
        RECORDS["a flipped bit in a name"](record)
    (place.root / "shared").mkdir()
    pushed = place.apart.mlcbuild("cache", "push", "--all", (place.root / "shared").as_uri())
    there = [path for path in (place.root / "shared").rglob("*") if path.is_file()]
    assert len(there) > 10 and not any(path.read_bytes() == bad for path in there)
    assert not any(path.name == record.name for path in there)
    if what == "blob":
        assert pushed.returncode == 1 and f"{blob} is not sent: its content has changed" in pushed.stderr
    exported = place.apart.mlcbuild("cache", "export", "all.tar")
    assert not list(place.root.glob(".all.tar*"))
    if what == "blob":
        assert exported.returncode == 1 and f"{blob}: weights-" in exported.stderr
        assert not (place.root / "all.tar").exists()
    else:
        with tarfile.open(place.root / "all.tar") as archive:
            assert f"ac/{record.name}" not in archive.getnames()


def test_verify_says_what_it_cannot_remove(place: Place, reader: tuple[str, ...]) -> None:
    blob, record = place.blob("weights/"), place.records("bundle/")[0]
    rot(blob)
    RECORDS["empty"](record)
    for path in (place.store, *place.store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    result = place.mlcbuild("cache", "verify", before=reader)
    assert (
        result.returncode == 1 and result.stdout.count("it cannot be removed: make the store writable") == 2
    )
    shutil.rmtree(place.root / "dist")
    result = place.mlcbuild("run", "recipe.yaml", "--only", "config/*", before=reader)
    assert result.returncode == 0, result.stdout + result.stderr
