"""Short forms of the checks that `ci/bench/kills` makes at length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import kills

COUNT = int(os.environ.get("MLCBUILD_TEST_KILLS", "6"))


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    assert kills.kill_many(tmp_path, COUNT, seed=COUNT).total() >= COUNT


def test_files_that_cannot_grow(tmp_path: Path) -> None:
    kills.fill_disk(tmp_path, seed=5)


def test_a_full_file_system(tmp_path: Path) -> None:
    if not kills.can_mount(tmp_path / "try"):
        pytest.skip("mounting a small file system needs root on Linux")
    kills.full_file_system(tmp_path / "site", seed=6)


def test_wrong_clocks(tmp_path: Path) -> None:
    if kills.FAKETIME is None:
        pytest.skip("libfaketime is not installed: apt-get install libfaketime")
    kills.skew_clocks(tmp_path, seed=7)


def test_files_from_the_past_and_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "FAKETIME", None)
    kills.skew_clocks(tmp_path, seed=8)


def test_a_killed_run_s_results_are_sent_by_the_next(tmp_path: Path) -> None:
    site = kills.Site(tmp_path, seed=9)
    site.clear()
    (tmp_path / "remote").rmdir()
    assert "9 not uploaded" in site.finish(site.build())
    (tmp_path / "remote").mkdir()
    assert "9 reused" in site.finish(site.build())
    site.compare()
    assert not list((tmp_path / "store" / "unsent").iterdir())
