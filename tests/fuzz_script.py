"""Runs `ci/bench/fuzz` in a process that has imported the modules of all targets, which takes longer than the
cases of a test: `python -m tests.fuzz_script ARGUMENT...`.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module

from tests.conftest import ROOT

SCRIPT = ROOT / "ci" / "bench" / "fuzz"
PARTS = SCRIPT.with_name("fuzz_parts")

sys.path.insert(1, str(SCRIPT.parent))
for path in sorted(PARTS.glob("*.py")):
    import_module(f"fuzz_parts.{path.stem}")

if __name__ == "__main__":
    runpy.run_path(str(SCRIPT), run_name="__main__")
