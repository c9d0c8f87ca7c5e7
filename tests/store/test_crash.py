"""Tests that kill builders with SIGKILL at random moments: stored results stay intact, a later run completes,
and nothing is left over."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.forkserver import COMMANDS, Process

ROOT = Path(__file__).resolve().parent.parent.parent
EVERY = "MLCBUILD_TEST_EVERY" in os.environ


def build(store: Path, note: Path) -> Process:
    """Starts a builder of the twelve steps of `tests.builder.chain` in a new process group, and returns its
    process."""
    return COMMANDS.start("tests.builder", [str(store), "chain", str(note)], ROOT, os.environ, session=True)


def workers(parent: int) -> list[int]:
    """Returns the process ids of a builder's worker processes."""
    result = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in result.stdout.splitlines()]
    return [int(pid) for pid, owner in rows if int(owner) == parent]


def wait_for_session(store: Path, process: Process) -> None:
    """Waits until a builder has created its temporary directory, so that it is not always killed during its
    start."""
    before = set(store.glob("tmp/*.lock"))
    end = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < end:
        if set(store.glob("tmp/*.lock")) - before:
            return
        time.sleep(0.01)


def files(store: Path) -> set[str]:
    """Returns the relative paths of all files of a store except its index, which a killed process may leave
    with a write-ahead log."""
    return {
        path.relative_to(store).as_posix()
        for path in store.rglob("*")
        if path.is_file() and not path.name.startswith("index.sqlite")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Returns the relative paths of a store's files after one build without disturbance. All builds use the
    same note file, because its path is part of the keys."""
    place = tmp_path_factory.mktemp("crash")
    with build(place / "store", Path("/dev/null")) as process:
        process.communicate()
    assert process.returncode == 0
    return files(place / "store")


@pytest.mark.parametrize("batch", range(8 if EVERY else 4))
def test_killed_builders_leave_a_store_that_a_rerun_completes(
    tmp_path: Path, undisturbed: set[str], batch: int
) -> None:
    """Kills three builders on one store, one after the other, at random moments, and checks that the next one
    completes."""
    moments = random.Random(batch)
    store = tmp_path / "store"
    for _ in range(3):
        with build(store, Path("/dev/null")) as process:
            wait_for_session(store, process)
            time.sleep(moments.uniform(0.0, 0.35))
            process.kill()
        if store.exists():
            assert verify(Store(store)).ok
    with build(store, Path("/dev/null")) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert {step["status"] for step in json.loads(out)["steps"]} <= {"built", "reused"}
    report = verify(Store(store))
    assert report.ok and report.records == 12 and report.unused == 0
    with Store(store).staging():
        pass  # a run without work does not clean up, and the last kill may have come too late
    assert files(store) == undisturbed


@pytest.mark.parametrize("batch", range(2 if EVERY else 1))
def test_killed_workers_fail_their_step_only(tmp_path: Path, undisturbed: set[str], batch: int) -> None:
    """Checks a builder whose workers are killed at random moments until it ends, and that a second run
    completes the build."""
    moments = random.Random(100 + batch)
    killed = 0
    for attempt in itertools.count():
        store = tmp_path / f"store{attempt}"
        before = killed
        with build(store, Path("/dev/null")) as process:
            while process.poll() is None and killed - before < 3:
                time.sleep(moments.uniform(0.02, 0.2))
                for pid in workers(process.pid)[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
            out, err = process.communicate(timeout=60)
        statuses = {step["status"] for step in json.loads(out)["steps"]}
        assert process.returncode == (1 if "failed" in statuses else 0), err
        assert "Traceback" not in err
        assert verify(Store(store)).ok
        with build(store, Path("/dev/null")) as process:
            _, err = process.communicate()
        assert process.returncode == 0, err
        assert files(store) == undisturbed
        if killed >= 4:  # a loaded machine looks for workers too late at times
            return
