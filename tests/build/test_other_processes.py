"""Tests of builds beside other processes: signals, killed parent processes, locks, full disks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.build.events import (
    Event,
    StepFinished,
)
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph
from mlcbuild.errors import StoreError
from mlcbuild.store.store import Store
from tests.build.runs import INLINE, clean, only, statuses, step

ROOT = Path(__file__).resolve().parent.parent.parent


def build(store: Path, graph: str, note: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.builder", str(store), graph, str(note)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Returns True if a process has ended; one that only waits to be reaped has."""
    result = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return result.stdout.strip()[:1] in {"", "Z"}


def test_two_processes_build_each_step_once(tmp_path: Path) -> None:
    note, store = tmp_path / "note", tmp_path / "store"
    with build(store, "shared", note) as one:
        wait_for(lambda: note.exists() and len(note.read_text().split()) == 2)
        with build(store, "shared", note) as other:
            assert other.stderr is not None
            line = other.stderr.readline()
            (tmp_path / "note.gate").write_text("")
            outputs = [one.communicate(), other.communicate()]
    assert line.startswith("wait    a") and line.endswith(f"waiting for another mlcbuild (pid {one.pid})\n")
    assert (one.returncode, other.returncode) == (0, 0)
    assert sorted(note.read_text().split()) == ["a0", "a1", "b"]
    steps = [json.loads(out)["steps"] for out, _ in outputs]
    built = [step["name"] for run in steps for step in run if step["status"] == "built"]
    assert sorted(built) == ["a0", "a1", "b"]
    clean(Store(store))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_its_workers_and_theirs_and_says_what_is_kept(
    tmp_path: Path, sent: signal.Signals
) -> None:
    note, store = tmp_path / "note", tmp_path / "store"
    with build(store, "holding", note) as process:
        wait_for(note.exists)
        process.send_signal(sent)
        out, err = process.communicate(timeout=200)  # the step would take 600 s
    assert process.returncode == 130
    assert all(gone(int(pid)) for pid in note.read_text().split())
    assert err.splitlines()[-1].startswith(f"interrupted by {sent.name}: 1 built, 0 reused, 1 skipped in ")
    assert err.splitlines()[-1].endswith("stopped: held. What was built is kept; run again to continue")
    assert json.loads(out)["steps"][1]["reason"] == f"interrupted by {sent.name}"
    clean(Store(store))


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with build(tmp_path / "store", "holding", note) as process:
        wait_for(note.exists)
        process.kill()
        process.wait()  # reading the pipes to their end would wait for an orphan
    for pid in note.read_text().split():
        wait_for(lambda pid=pid: gone(int(pid)))  # type: ignore[misc]  # a default binds the loop's value


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_step_fails_whose_lock_cannot_be_made(store: Store, tmp_path: Path, keep_going: bool) -> None:
    graph = Graph([step("a", text="x"), step("b", text="y"), step("c", text="z")])
    key = only(execute(graph, Store(tmp_path / "before"), INLINE), "b").key
    assert key is not None

    def obstruct(event: Event) -> None:
        if isinstance(event, StepFinished) and event.result.name == "a":
            (store.root / "locks" / key / "not a lock").mkdir(parents=True)

    result = execute(graph, store, Options(executor="inline", keep_going=keep_going), obstruct)
    assert statuses(result) == {"a": "built", "b": "failed", "c": "built" if keep_going else "skipped"}
    error = only(result, "b").error
    assert isinstance(error, StoreError) and f"Directory not empty: {store.root / 'locks' / key}" in str(
        error
    )
    if not keep_going:
        assert only(result, "c").reason == "not started: b failed"
    (store.root / "locks" / key / "not a lock").rmdir()
    assert execute(graph, store, INLINE).ok


def test_a_full_disk_is_told_and_leaves_a_usable_store(tmp_path: Path) -> None:
    """Limits the size of files to 64 kB for this process and its workers, so that writing more fails as on a
    full disk."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from mlcbuild.build.execute import *; from mlcbuild.build.graph import *\n"
        "from mlcbuild.store.store import Store\n"
        "from mlcbuild.reports.report import summary\n"
        "big = Step('big', 'tests.actions:big', {'bytes': int(sys.argv[2])}, {})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "small = Step('small', 'tests.actions:text', {}, {})\n"
        "result = execute(Graph([small, big]), Store(Path(sys.argv[1])))\n"
        "print(result.steps[0].status, type(result.steps[1].error).__name__, result.steps[1].error)\n"
    )
    store = tmp_path / "store"
    command = [sys.executable, "-c", code, str(store), "100000"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout == (
        f"built StoreError the store at {store} cannot be written: no space is left; free some, run "
        "`mlcbuild cache gc`, or set MLCBUILD_STORE elsewhere\n"
    )
    clean(Store(store))
    assert execute(Graph([step("big", "big", bytes=100000)]), Store(store), INLINE).ok


def test_a_full_file_system_is_told_and_leaves_a_usable_store(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    try:
        store = Store(place / "store")
        assert execute(Graph([step("a", text="x")]), store, INLINE).ok
        result = execute(Graph([step("a", text="x"), step("big", "big", bytes=2 << 20)]), store)
        assert isinstance(only(result, "big").error, StoreError)
        assert only(result, "a").status == "reused"
        assert execute(Graph([step("b", text="y")]), store).ok
        clean(store)
    finally:
        subprocess.run(["umount", place], check=True)
