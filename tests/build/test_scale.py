"""Tests that the cost of a build grows linearly with the size of its recipe. They count function calls
instead of seconds.

For each model that is added, the number of calls may grow by the same amount, or by less where something is
bounded, such as a picture. A quadratic algorithm would add more calls each time. The count does not depend on
the machine's load.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.cli import main
from tests import product

SIZES = (4, 8, 16)
"""Numbers of models in the recipes whose costs are compared. Each recipe has 2 schemes and 3 targets."""
TARGETS = ("x86-64-v2", "aarch64-linux", "cortex-a72")
OF_A_STORE = {
    "status": ("cache", "status"),
    "gc": ("cache", "gc", "--unused-days", "30"),
    "verify": ("cache", "verify"),
}
COMMANDS = {
    "validate": ("validate", "recipe.yaml"),
    "plan": ("plan", "recipe.yaml"),
    "run": ("run", "recipe.yaml"),
    "matrix": ("matrix", "recipe.yaml", "--all"),
    "shard": ("shard", "recipe.yaml"),
    "report": ("report", "recipe.yaml"),
    "graph": ("graph", "recipe.yaml", "--format", "dot"),
    **OF_A_STORE,
}


def calls(work: Callable[[], object]) -> int:
    """Returns how many functions are called, those written in C included, while `work` runs."""
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    return int(vars(pstats.Stats(profile))["total_calls"])


def test_costs_are_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCBUILD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    # Younger files are read again and get no receipt. Here all count as young, so that counts do not vary.
    monkeypatch.setattr("mlcbuild.store.stamp.RACY_NS", 10**18)
    product.replace_work(monkeypatch.setattr)
    counts: dict[str, list[int]] = {name: [] for name in COMMANDS}
    for models in SIZES:
        product.make(tmp_path, models, ("q4f16_1", "q0f32"), TARGETS)
        assert main(["run", "recipe.yaml", "--executor", "inline"]) == 0

        for name, command in COMMANDS.items():

            def work(command: tuple[str, ...] = command) -> None:
                assert main(command) == 0

            if models == SIZES[0]:
                work()  # performs what happens once in a process, such as imports
            counts[name].append(calls(work))
        capsys.readouterr()
    for name, (small, middle, large) in counts.items():
        growth = (large - middle) / (middle - small)
        assert growth < 2.12, f"{name}: {small}, {middle}, {large} calls"
