"""Tests of full remotes (a bucket with a quota, a registry on a small file system), and of machines whose
clock is wrong."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlcbuild.build.graph import Graph
from mlcbuild.remotes import s3
from mlcbuild.store.upkeep import verify
from tests import builder, kills, registries
from tests.buckets import Server
from tests.registries import registry
from tests.remotes.users import BUILT, CHAIN, REUSED, User, statuses, step

LARGE = Graph([step(name, "big", bytes=size) for name, size in (("a", 1_000_000), ("b", 3_000_000))])


def test_a_full_bucket_costs_a_warning_and_is_filled_later(
    s3_server: Server, s3_login: None, tmp_path: Path
) -> None:
    name = f"b{secrets.token_hex(8)}"
    url = s3_server.bucket(name)
    for how in (["set", "--max-objects", "3"], ["enable"]):
        s3_server.admin("quota", how[0], "--quota-scope", "bucket", "--bucket", name, *how[1:])
    user = User(tmp_path / "one", url)
    result = user.run()
    assert statuses(result) == BUILT and result.not_uploaded
    (warning,) = user.warnings()
    assert "is not written to in this run: it is full (status 403, QuotaExceeded)" in warning
    s3_server.admin("quota", "disable", "--quota-scope", "bucket", "--bucket", name)
    assert statuses(user.run()) == REUSED and user.warnings() == []
    second = User(tmp_path / "two", url)
    assert statuses(second.run()) == REUSED and second.warnings() == []


def test_a_bucket_on_a_full_disk_costs_a_warning_and_is_filled_later(
    s3_server: Server, s3_login: None, tmp_path: Path
) -> None:
    """Checks that a run continues without uploading if Ceph's disk is full: Ceph then does not respond to
    writers, but still serves readers."""
    url = s3_server.bucket(f"b{secrets.token_hex(8)}")
    large = Graph([step("big", "big", bytes=s3.PART + 1)])
    before = Graph([step("before", text="there was room")])
    assert User(tmp_path / "zero", url).run(before).not_uploaded == {}
    with s3_server.full():
        user = User(tmp_path / "one", url)
        user.timeout = 3.0
        for graph in (CHAIN, large):
            result = user.run(graph)
            assert result.ok and set(statuses(result).values()) == {"built"} and result.not_uploaded
            (warning,) = user.warnings()
            assert warning.endswith("is not written to in this run: it does not answer")
        assert statuses(User(tmp_path / "two", url).run(before)) == {"before": "reused"}
    user.timeout = 60.0
    for graph in (CHAIN, large):
        assert set(statuses(user.run(graph)).values()) == {"reused"} and user.warnings() == []
        other = User(tmp_path / "two", url)
        assert set(statuses(other.run(graph)).values()) == {"reused"} and other.warnings() == []


def test_a_full_registry_costs_a_warning_and_is_filled_later(tmp_path: Path) -> None:
    if registries.REGISTRY is None:
        pytest.skip(registries.WITHOUT_REGISTRY)
    if not kills.can_mount(tmp_path / "try"):
        pytest.skip("mounting a small file system needs root on Linux")
    with registry(tmp_path / "registry") as server:
        small = server.home / "data"
        small.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], check=True)
        try:
            user = User(tmp_path / "one", server.url("cache"))
            result = user.run(LARGE)
            assert statuses(result) == {"a": "built", "b": "built"}
            assert "b" in result.not_uploaded
            (warning,) = user.warnings()
            assert "is not written to in this run: it " in warning
            other = User(tmp_path / "two", server.url("cache"))
            assert statuses(other.run(LARGE))["b"] == "built"
            subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
            user.timeout = 60.0  # Registries are slow beside other tests.
            assert user.run(LARGE).not_uploaded == {} and user.warnings() == []
            third = User(tmp_path / "three", server.url("cache"))
            assert statuses(third.run(LARGE)) == {"a": "reused", "b": "reused"} and third.warnings() == []
            assert verify(third.store).ok
        finally:
            subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_registry_that_kept_manifests_cut_short_is_given_others(tmp_path: Path) -> None:
    """Checks that uploads repair a registry whose stored manifests were cut short because its disk was full.
    Such a registry accepts the same bytes again without storing them, so the uploaded manifests differ."""
    if registries.REGISTRY is None:
        pytest.skip(registries.WITHOUT_REGISTRY)
    with registry(tmp_path / "registry") as server:
        assert statuses(User(tmp_path / "one", server.url("cache")).run()) == BUILT
        (tags,) = server.home.glob("data/**/_manifests")
        shutil.rmtree(tags)
        kept = [path for path in server.home.glob("data/**/data") if b"schemaVersion" in path.read_bytes()]
        assert len(kept) == 6, "a record and a file of each of three steps"
        for path in kept:
            path.write_bytes(b"")
        second = User(tmp_path / "two", server.url("cache"))
        assert statuses(second.run()) == BUILT and second.warnings() == []
        third = User(tmp_path / "three", server.url("cache"))
        assert statuses(third.run()) == REUSED and third.warnings() == []


CLOCK = "its clock and that of this machine differ by more than it allows (status 403, "


@pytest.mark.parametrize("off", ["+1d", "-1d"])
def test_a_machine_with_a_wrong_clock_builds_and_is_told(
    s3_server: Server, s3_login: None, tmp_path: Path, off: str
) -> None:
    if kills.FAKETIME is None:
        pytest.skip("libfaketime is not installed: apt-get install libfaketime")
    url = s3_server.bucket(f"b{secrets.token_hex(8)}")
    fake = {"LD_PRELOAD": str(kills.FAKETIME), "FAKETIME": off, "FAKETIME_NO_CACHE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.builder", str(tmp_path / "store"), "chain", "/dev/null", "pool", url],
        cwd=kills.ROOT,
        env={**os.environ, **fake},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    if (
        off == "+1d" and CLOCK not in result.stderr
    ):  # some servers take addresses that are signed in the future
        assert "warning" not in result.stderr and "not uploaded" not in result.stderr
        reused = User(tmp_path / "two", url).run(Graph(builder.chain("/dev/null")))
        assert set(statuses(reused).values()) == {"reused"}
    else:
        assert CLOCK in result.stderr
