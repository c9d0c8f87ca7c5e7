"""The benchmark of downloads, with one megabyte."""

from __future__ import annotations

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
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["http", "curl"],
        ["http", "fetch"],
        ["http", "share"],
    ]
