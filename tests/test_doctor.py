"""Tests of the checks of this machine: each failure is one result, and the others go on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mlcbuild import doctor
from mlcbuild.doctor import Check
from mlcbuild.errors import SetupError


def test_a_failing_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(error: Exception) -> object:
        def check(_: Path | None) -> str:
            raise error

        return check

    listed = {
        "a": fails(SetupError("install it")),
        "b": lambda store: f"at {store}",
        "c": fails(OSError("no disk")),
        "d": fails(PackageNotFoundError("tvm")),
    }
    monkeypatch.setattr(doctor, "CHECKS", listed)
    assert [(check.name, check.ok) for check in doctor.checks(tmp_path)] == [
        ("a", False), ("b", True), ("c", False), ("d", False),
    ]  # fmt: skip
    assert doctor.checks(tmp_path)[0] == Check("a", False, "install it")
    with pytest.raises(KeyError):
        monkeypatch.setattr(doctor, "CHECKS", {"a": fails(KeyError("a defect"))})
        doctor.checks()


def test_a_store_that_cannot_be_written_is_found_before_it_exists(tmp_path: Path) -> None:
    assert str(tmp_path / "new" / "deep") in doctor._store(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists(), "looking creates nothing"
    with pytest.raises(Exception, match=r"cannot be written .*; set MLCBUILD_STORE to a directory of yours"):
        doctor._store(Path("/proc/nowhere/store"))
