"""Helpers for tests of the build engine, which run small graphs of steps in the test's own process."""

from __future__ import annotations

from mlcbuild.build.events import (
    RunResult,
    StepResult,
)
from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Input, Step
from mlcbuild.canon import Json
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify

INLINE = Options(executor="inline")


def step(
    name: str, function: str = "text", *needs: str, memory: int = 1, cores: int = 1, **params: Json
) -> Step:
    inputs = {need: Input(need) for need in needs}
    return Step(name, f"tests.actions:{function}", params, inputs, memory=memory, cores=cores)


def statuses(result: RunResult) -> dict[str, str]:
    return {step.name: step.status for step in result.steps}


def only(result: RunResult, name: str) -> StepResult:
    return next(step for step in result.steps if step.name == name)


def clean(store: Store) -> None:
    """Asserts that nothing of a run is left in the store but its results."""
    assert not any((store.root / "tmp").iterdir())
    assert not any((store.root / "locks").iterdir())
    assert verify(store).ok
