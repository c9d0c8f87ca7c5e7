"""Tests of the benchmark of downloads, with a file of one megabyte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.caches import NGINX, WITHOUT_NGINX
from tests.conftest import ROOT


@pytest.mark.skipif(NGINX is None, reason=WITHOUT_NGINX)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_downloads_are_measured_beside_curl() -> None:
    command = [
        sys.executable,
        str(ROOT / "ci/bench/remotes"),
        "http",
        "--megabytes=1",
        "--rounds=1",
        "--share=0",
        "--set=mlcbuild.remotes.ranges.FIRST=65536",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["http", "upload"],
        ["http", "curl"],
        ["http", "fetch"],
        ["http", "share"],
    ]


@pytest.mark.parametrize(
    "setting", ["mlcbuild.remotes.ranges.Ranges=3", "nowhere.A=1", "mlcbuild.canon.NONE=1"]
)
def test_only_numbers_of_modules_are_set(setting: str) -> None:
    program = "import sys; from set_constants import apply; apply(sys.argv[1:])"
    command = [sys.executable, "-c", program, setting]
    paths = os.pathsep.join(map(str, (ROOT / "ci" / "bench", ROOT, ROOT / "runtime")))
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"--set {setting}: the name of a number and a number are needed: ")


def test_a_constant_is_set_wherever_it_is_used() -> None:
    program = """
from mlcbuild.remotes import client, transport
from set_constants import apply
apply(["mlcbuild.remotes.transport.CHUNK=65536", "mlcbuild.remotes.transport.CONNECT=2"])
print(transport.CHUNK, client.CHUNK, transport.CONNECT)
"""
    paths = os.pathsep.join(map(str, (ROOT / "ci" / "bench", ROOT, ROOT / "runtime")))
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == ["65536", "65536", "2.0"], result.stderr
