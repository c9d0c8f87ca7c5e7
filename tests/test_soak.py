"""Tests that run ci/bench/soak briefly; MLCBUILD_SOAK_MINUTES makes it longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

MINUTES = os.environ.get("MLCBUILD_SOAK_MINUTES", "0.1")


def test_many_clients_good_and_bad_and_kills(tiny_bundles: Path) -> None:
    # With this scheme, tile registers compute prompts in another way than answers.
    script, bundle = ROOT / "ci" / "bench" / "soak", tiny_bundles / "dist" / "tiny-q4a8_1-host"
    command = [sys.executable, str(script), str(bundle), "--minutes", MINUTES, "--kills", "1"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    result = subprocess.run(
        [*command, "--streams", "24"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z ]+)[,;]", result.stdout)}
    assert counts["stream"] and counts["leave"] and counts["cut by a kill"], result.stdout
