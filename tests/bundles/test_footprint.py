"""Tests that compare the estimate of a bundle's memory with the peak that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlcbuild.bundles import footprint
from mlcbuild.errors import VerificationError


@pytest.mark.parametrize("scheme", ["q0f32", "q4a8_1"])
def test_the_estimate_is_near_the_measured_peak(scheme: str, tiny_bundles: Path) -> None:
    bundle = tiny_bundles / "dist" / f"tiny-{scheme}-host"
    estimated = json.loads((bundle / "bundle.json").read_bytes())["memory"]["total"]
    # The interpreter's own growth is about a megabyte, which counts on a model this small.
    assert abs(footprint.measure(bundle) - estimated) < 0.15 * estimated + 1_500_000


def test_the_peak_without_proc_is_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = footprint._peak()
    monkeypatch.setattr(Path, "read_text", lambda path: "VmPeak: 5 kB\n")
    assert footprint._peak() == pytest.approx(expected, rel=0.5)


def test_a_directory_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"there is no bundle\.json in it"):
        footprint.measure(tmp_path)
