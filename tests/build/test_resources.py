"""Tests of how an executor counts its free cores and memory while steps run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from mlcbuild.build.executors import Inline, Pool, StepExecutor
from mlcbuild.build.graph import Step
from mlcbuild.build.resources import Capacity, executor
from mlcbuild.build.schedule import Options
from mlcbuild.errors import MlcbuildError
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.signals import Bell
from mlcbuild.store.store import Store


@dataclass
class Machine:
    """A replacement for an executor whose number of cores and size of memory the test chooses."""

    cores: int = 8
    memory: int = 100
    capacity: int = 8

    def grant(self, step: Step, expected: int) -> int:
        return expected


def step(name: str, cores: int = 1, memory: int = 1, alone: bool = False) -> Step:
    return Step(name, "m:f", {"name": name}, {}, cores=cores, memory=memory, alone=alone)


def capacity(**options: int) -> Capacity:
    return Capacity(cast(StepExecutor, Machine()), Options(**options))  # type: ignore[arg-type]


def test_cores_are_shared_with_the_steps_that_wait() -> None:
    free = capacity()
    assert free.take(step("a", cores=64), others=0) == 8
    assert not free.open()
    free.give_back(step("a"))
    assert free.take(step("b", cores=64), others=3) == 2 and free.open()
    assert free.take(step("c", cores=64), others=0) == 6 and not free.open()


def test_options_lower_what_is_shared() -> None:
    free = capacity(jobs=3, memory=10)
    assert free.take(step("a", cores=64, memory=8), others=0) == 3
    assert not free.fits(step("b", memory=3)) and free.fits(step("c", memory=2))


def test_a_step_that_is_too_large_runs_when_nothing_else_does() -> None:
    free, huge = capacity(), step("huge", memory=1000)
    assert free.fits(huge)
    free.take(step("a"), others=0)
    assert not free.fits(huge)
    free.give_back(step("a"))
    assert free.fits(huge)


def test_a_step_that_measures_runs_alone() -> None:
    free, measured = capacity(), step("measured", alone=True)
    free.take(step("a"), others=5)
    assert not free.fits(measured)
    free.give_back(step("a"))
    free.take(measured, others=5)
    assert not free.fits(step("b"))
    free.give_back(measured)
    assert free.fits(step("b"))


def test_no_more_steps_than_workers() -> None:
    free = Capacity(cast(StepExecutor, Machine(capacity=2)), Options())
    for name in ("a", "b"):
        assert free.open()
        free.take(step(name), others=7)
    assert not free.open()


def test_options_name_the_executor(tmp_path: Path) -> None:
    store = Store(tmp_path)
    sharing = Sharing(store)
    with store.staging() as area, Bell() as bell:
        assert isinstance(executor(Options(executor="inline"), sharing, area, bell), Inline)
        pool = executor(Options(executor="pool", jobs=3), sharing, area, bell)
        assert isinstance(pool, Pool) and pool.capacity == 3
        with pytest.raises(MlcbuildError):
            executor(Options(executor="dask://127.0.0.1:1"), sharing, area, bell)
