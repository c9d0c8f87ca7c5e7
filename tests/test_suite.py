"""The suite itself: what it says of tests that this machine cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_what_is_skipped_is_grouped_at_the_end() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/compiler/test_aarch64.py"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MLCBUILD_AARCH64": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    title, line = done.stdout.partition("not tested on this machine")[1:]
    assert title and "   3 /nowhere is not there: ci/emulated-aarch64 (test_aarch64)\n" in line
