"""Tests of the control groups of a process, on simulated machines with both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlcbuild_format import versions
from mlcbuild_format.control_groups import directories


def groups(root: Path, text: str, controller: str) -> list[str]:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(text)
    return [str(place.relative_to(root / "sys/fs/cgroup")) for place in directories(controller, root)]


@pytest.mark.parametrize("controller", ["memory", "cpu"])
def test_version_2_has_one_group_and_its_parents(controller: str, tmp_path: Path) -> None:
    assert groups(tmp_path, "0::/a/b.service\n", controller) == ["a/b.service", "a", "."]
    assert groups(tmp_path, "0::/\n", controller) == ["."]


def test_version_1_has_a_directory_for_each_controller(tmp_path: Path) -> None:
    text = "5:cpu,cpuacct:/x\n4:memory:/x/y\n1:name=systemd:/z\n"
    assert groups(tmp_path, text, "memory") == ["memory/x/y", "memory/x", "memory"]
    assert groups(tmp_path, text, "cpu") == ["cpu/x", "cpu"]
    assert groups(tmp_path, text + "0::/v2\n", "memory")[-2:] == ["v2", "."]


def test_names_with_colons_and_files_that_are_none(tmp_path: Path) -> None:
    assert groups(tmp_path, "0::/a:b\nnonsense\n", "cpu") == ["a:b", "."]
    (tmp_path / "proc/self/cgroup").write_bytes(b"\xff\xfe")
    assert directories("cpu", tmp_path) == directories("cpu", tmp_path / "nowhere") == []


def test_formats_are_a_name_and_a_number() -> None:
    """Checks the identifiers of format versions that are stored in compiled libraries and weights files:
    after a change the runtime refuses all existing files."""
    assert (versions.LIBRARY, versions.WEIGHTS) == ("mlcbuild-library/2", "mlcbuild-weights/1")
