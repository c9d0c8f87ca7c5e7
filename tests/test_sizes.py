"""Tests of parsing and formatting sizes for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mlcbuild_format import sizes

from tests.forkserver import COMMANDS


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("812B", 812),
        ("1.5kB", 1500),
        ("50GB", 50 * 10**9),
        ("50 gb", 50 * 10**9),
        ("50G", 50 * 10**9),
        ("50GiB", 50 << 30),
        ("50Gi", 50 << 30),
        ("2KiB", 2048),
        ("2TiB", 2 << 40),
    ],
)
def test_a_size_has_decimal_or_binary_units(text: str, count: int) -> None:
    assert sizes.parse(text) == count


@pytest.mark.parametrize(
    "text", ["", "much", "-1GB", "1XB", "1iB", "GB", "1e3", "9" * 400, "1\N{KELVIN SIGN}B"]
)
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=f"^must be a size such as 8GB or 512MiB, found '{text}'$"):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (3_100_000, "3.1 MB"),
        (16_400_000_000, "16.4 GB"),
        (2 * 10**15, "2000.0 TB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert sizes.show(count) == text


@pytest.mark.parametrize("size", ["50GB", "50GiB", "50 gib"])
@pytest.mark.parametrize(
    "command",
    [
        ["mlcbuild", "cache", "gc", "--store", "store", "--max-size"],
        ["mlcbuild_runtime", "nowhere", "--memory"],
        ["mlcbuild", "serve", "nowhere", "--memory"],
    ],
)
def test_commands_accept_both_kinds_of_units(command: list[str], size: str, tmp_path: Path) -> None:
    module, *words = command
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    good, bad = (
        COMMANDS.run(module, [*words, text], tmp_path, environment, timeout=100) for text in (size, "much")
    )
    assert good.stdout.startswith("removed 0 records") or "nowhere" in good.stderr
    assert "must be a size" not in good.stderr
    assert bad.returncode == 2
    assert f"argument {command[-1]}: must be a size such as 8GB or 512MiB, found 'much'" in bad.stderr
