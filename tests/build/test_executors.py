"""Tests of the pools in which jobs run: worker processes are reused, replaced when they die, and ended
together with their child processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from mlcbuild import machine
from mlcbuild.build import executors
from mlcbuild.build.events import StepProgress
from mlcbuild.build.executors import Inline, Message, Pool
from mlcbuild.build.worker import Job, Outcome
from mlcbuild.canon import Json
from mlcbuild.errors import StepError
from mlcbuild.signals import Bell
from mlcbuild.store.records import Preimage
from mlcbuild.store.staging import StagingArea
from mlcbuild.store.store import Store

PATIENCE = 60.0
"""Seconds to wait for a message of a worker, on a busy machine."""


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def job(store: Store, area: StagingArea, name: str, function: str = "text", **params: Json) -> Job:
    preimage = Preimage(f"tests.actions:{function}", {"text": name, **params}, {}, {}, {})
    return Job(name, preimage.key(), preimage, (), 1, store.root, area.subdirectory(), store.log(name))


def heard(executor: Pool | Inline, count: int) -> list[Outcome]:
    """Returns the next `count` outcomes of jobs, and drops other messages. Fails after PATIENCE seconds."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + PATIENCE
    with Bell() as bell:
        while len(outcomes) < count:
            assert time.monotonic() < end
            outcomes += [item for item in executor.messages(1.0, bell.fileno()) if isinstance(item, Outcome)]
    return outcomes


def processes(pool: Pool) -> set[int]:
    return {worker.process.pid for worker in pool._workers}


def test_a_worker_is_kept_and_two_jobs_have_two(store: Store, area: StagingArea, pool: Pool) -> None:
    pool.start(job(store, area, "a"))
    assert [item.name for item in heard(pool, 1)] == ["a"]
    first = processes(pool)
    assert len(first) == 1
    for name in ("b", "c"):
        pool.start(job(store, area, name))
    assert {item.name for item in heard(pool, 2)} == {"b", "c"}
    assert first < processes(pool) and len(processes(pool)) == 2


def test_a_killed_worker_fails_its_job_and_is_replaced(store: Store, area: StagingArea, pool: Pool) -> None:
    work = job(store, area, "slow", sleep_ms=60_000)
    pool.start(work)
    (process,) = processes(pool)
    os.kill(process, signal.SIGKILL)
    (outcome,) = heard(pool, 1)
    assert isinstance(outcome.error, StepError)
    assert str(outcome.error).startswith(
        "step slow: its worker process was killed by SIGKILL (signal 9), as the"
    )
    assert str(outcome.error).endswith(f"log: {work.log}")
    assert processes(pool) == set()
    pool.start(job(store, area, "next"))
    (outcome,) = heard(pool, 1)
    assert outcome.error is None and process not in processes(pool)


def test_a_worker_that_died_while_idle_costs_no_job(store: Store, area: StagingArea, pool: Pool) -> None:
    pool.start(job(store, area, "a"))
    heard(pool, 1)
    (worker,) = pool._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    pool.start(job(store, area, "b"))
    (outcome,) = heard(pool, 1)
    assert outcome.name == "b" and (outcome.error is None or "worker process" in str(outcome.error))
    pool.start(job(store, area, "c"))
    assert heard(pool, 1)[0].error is None


def test_a_job_fails_if_no_worker_can_be_started(
    store: Store, area: StagingArea, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", popen)
        pool.start(job(store, area, "a"))
        (outcome,) = heard(pool, 1)
    assert str(outcome.error) == (
        "step a: no worker process can be started: Too many open files; try fewer --jobs"
    )
    pool.start(job(store, area, "b"))
    assert heard(pool, 1)[0].error is None


def test_closing_ends_running_workers(store: Store, area: StagingArea) -> None:
    pool = Pool(1)
    pool.start(job(store, area, "slow", sleep_ms=600_000))  # more than a test may take
    (process,) = processes(pool)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_waiting_ends_when_the_bell_rings(store: Store, area: StagingArea, pool: Pool) -> None:
    pool.start(job(store, area, "slow", sleep_ms=600_000))
    with Bell() as bell:
        bell.ring()
        assert list(pool.messages(600, bell.fileno())) == []  # more than a test may take


def test_inline_runs_a_job_when_it_is_started(store: Store, area: StagingArea) -> None:
    inline = Inline()
    inline.start(job(store, area, "a"))
    messages: list[Message] = list(inline.messages(0.0, 0))
    assert [item.name for item in messages if isinstance(item, Outcome)] == ["a"]
    assert list(inline.messages(0.0, 0)) == [] and inline.capacity == 1


def test_progress_of_a_worker_carries_the_name_of_its_step(
    store: Store, area: StagingArea, pool: Pool
) -> None:
    pool.start(job(store, area, "p", "slow_progress"))
    messages: list[Message] = []
    end = time.monotonic() + PATIENCE
    with Bell() as bell:
        while not any(isinstance(item, Outcome) for item in messages):
            assert time.monotonic() < end
            messages += pool.messages(1.0, bell.fileno())
    reports = [item for item in messages if isinstance(item, StepProgress)]
    assert reports and {item.name for item in reports} == {"p"}


def test_executors_here_share_this_machine(pool: Pool) -> None:
    assert (pool.cores, pool.memory, pool.capacity) == (machine.cores(), machine.memory(), 2)
    assert Pool(0).capacity == machine.cores()


def test_what_could_change_results_is_fixed_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    variables = dict[str, str]()

    def start(command: object, *, env: dict[str, str], **options: object) -> None:
        variables.update(env)
        raise OSError("enough is seen")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="enough"):
        executors._spawn()
    assert (variables["PYTHONHASHSEED"], variables["OMP_NUM_THREADS"]) == ("0", "1")
    assert variables["OPENBLAS_NUM_THREADS"] == "1" and variables["PATH"]
