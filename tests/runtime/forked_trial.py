"""Tries bundles in processes that are forked from one which has imported NumPy and TVM already, since these
imports take most of the time of a trial.
The program is `trial_child.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlcbuild_runtime import untrusted

from . import shared

CHILD = "tests.runtime.trial_child"


def run_child(path: Path, parts: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Tries parts of a bundle in a forked process, and replaces the function that starts a new Python
    process."""
    arguments, variables = [str(path), *parts], shared.environment(untrusted._FEW_THREADS)
    process = shared.PROGRAMS.run(CHILD, arguments, Path.cwd(), variables, untrusted.SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, process.stdout.encode())


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes trials of bundles run in forked processes, instead of new Python processes."""
    monkeypatch.setattr(untrusted, "_run_child", run_child)
