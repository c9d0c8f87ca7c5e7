"""Tests of builds on a real dask.distributed scheduler, whose workers are processes with separate stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build import cluster
from mlcbuild.build.cluster import client
from mlcbuild.build.events import StepProgress, StepResult
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step
from mlcbuild.errors import SetupError
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests import builder
from tests.build.cluster_runs import TEXT, Run
from tests.cluster import ROOT, Cluster, started
from tests.forkserver import Process

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a cluster of four workers, of which a test may kill `three` and `four`."""
    with started(tmp_path_factory.mktemp("cluster")) as actual:
        actual.worker("one", "--labels", "first")
        actual.worker("two", "--labels", "fast, gpu=1")
        actual.worker("three", "--labels", "mortal")
        actual.worker("four", "--labels", "mortal")
        actual.wait("one", "two", "three", "four")
        yield actual


def trees(store: Path) -> dict[str, bytes]:
    """Returns key of a record -> its first line, which states the files and their digests."""
    return {
        path.name: path.read_bytes().partition(b"\n")[0]
        for path in (store / "ac").rglob("*")
        if path.is_file()
    }


def contents(store: Path) -> object:
    return trees(store), files(store)


def files(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store / "cas").rglob("*") if path.is_file()}


def until(what: object, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_two_and_four_workers_give_the_same_bytes_as_this_machine(two: Cluster, tmp_path: Path) -> None:
    nodes = builder.chain("/dev/null")
    local = Store(tmp_path / "local")
    assert execute(Graph(nodes), local, Options(jobs=1)).ok
    whole = trees(local.root), files(local.root)
    used: dict[int, set[str]] = {}
    for count, labels in ((1, ("fast",)), (2, ()), (4, ())):
        place = tmp_path / str(count)
        place.mkdir()
        run = Run(two, place)
        chosen = [replace(node, needs=labels) if isinstance(node, Step) else node for node in nodes]
        # Steps are forced, because the workers keep their results from the previous number of workers.
        result = run(chosen, jobs=count, force=("*",))
        assert result.ok and result.count("built") == 12
        remote = place / "remote"
        assert (trees(remote), files(remote)) == whole
        expected = {path: data for path, data in whole[1].items() if b"2/" in data}
        assert files(run.store.root) == expected, "only the last steps' files came here"
        assert verify(run.store).ok
        used[count] = {worker for step in result.steps for worker in [step.worker]}
        again = run(chosen)
        assert again.count("reused") == 12
    assert used[1] == {"two"} and len(used[4]) > 2


def test_a_worker_with_the_run_s_store_needs_no_remote(two: Cluster, tmp_path: Path) -> None:
    nodes: list[Node] = [
        Step("a", TEXT, {"text": "same"}, {}, needs=("first",)),
        Step("b", "tests.actions:noisy", {}, {"a": Input("a")}, needs=("first",)),
    ]
    result = Run(two, tmp_path)(nodes, shared=False)
    assert "is not the run's, and there is no remote that both read and write" in str(result.steps[0].error)
    run = Run(two, tmp_path)
    run.store = Store(two.place / "one")
    result = run(nodes, shared=False)
    assert result.ok and {step.worker for step in result.steps} == {"one"}
    assert verify(run.store).ok
    log = result.steps[1].log
    assert log is not None
    assert sorted(log.read_text().splitlines()) == ["from a child", "from native code", "from python"]


def test_a_source_that_workers_do_not_see_goes_through_the_remote(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/cwd").exists():
        pytest.skip("this system has no path that means something else to each process")
    (tmp_path / "mine.txt").write_text("seen by one process only")
    run = Run(two, tmp_path)
    monkeypatch.chdir(tmp_path)
    source = Source("mine", Path("/proc/self/cwd"), ("mine.txt",))
    result = run([source, Step("copy", TEXT, {"text": "head"}, {"of": Input("mine")})])
    assert result.ok, result.steps[0].error
    record = result.steps[0].record
    assert record is not None
    assert run.store.blob(record.rows[0][1]).read_text() == "head\nseen by one process only"
    assert not run.warnings()


def test_a_source_that_workers_see_is_read_in_place(two: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("seen by all")
    run = Run(two, tmp_path)
    source = Source("mine", tmp_path, ("mine.txt",))
    result = run([source, Step("copy", TEXT, {"text": "head"}, {"of": Input("mine")})])
    assert result.ok
    assert b"seen by all" not in files(tmp_path / "remote").values()


def lose(two: Cluster, run: Run, place: Path, do: Callable[[Process], None]) -> tuple[StepResult, list[str]]:
    """Runs a step that waits on the first worker which gets it, and calls `do` for that worker. Returns
    (result of the step, workers that it ran on).
    """
    note = place / "note"
    params = {"note": str(note), "gate": str(place / "gate")}
    step = Step("held", "tests.actions:hold_once", params, {}, needs=("mortal",))

    def act() -> None:
        until(lambda: note.exists() and run.places("held"))
        do(two.named(run.places("held")[0]))

    thread = threading.Thread(target=act)
    thread.start()
    result = run([step])
    thread.join()
    return result.steps[0], run.places("held")


def test_lost_workers(two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a step runs again on another worker after its worker was killed, was told to stop, or was
    declared dead though it is alive; and that the step fails when too many workers die of it."""
    two.worker("five", "--labels", "mortal")
    killed, left, frozen, doomed = ((tmp_path / name) for name in ("killed", "left", "frozen", "doomed"))
    for place in (killed, left, frozen, doomed):
        place.mkdir()

    run = Run(two, killed)
    step, places = lose(two, run, killed, lambda worker: worker.kill())
    assert step.status == "built", step.error
    assert len(set(places)) == 2
    assert f"step held is run again on {places[1]}: {places[0]} was lost" in run.warnings()
    until(lambda: not any(alive(int(pid)) for pid in (killed / "note").read_text().split()))
    assert verify(run.store).ok and all(verify(Store(two.place / name)).ok for name in places)

    two.worker("six", "--labels", "mortal")
    two.wait("five")
    run = Run(two, left)
    step, places = lose(two, run, left, lambda worker: worker.terminate())
    assert step.status == "built", step.error
    assert two.named(places[0]).wait(60) == 0
    assert not list((two.place / places[0] / "tmp").iterdir()), "nothing is left in its store"
    assert "was lost" not in run.warnings()
    until(lambda: not alive(int((left / "note").read_text().split()[0])))

    two.worker("seven", "--labels", "mortal")
    two.wait("six")
    run = Run(two, frozen)
    step, places = lose(two, run, frozen, two.declare_dead)
    assert step.status == "built", step.error
    before = contents(frozen / "remote")
    (frozen / "gate").write_text("")  # its child is done at once; the worker learns of it when it wakes
    two.named(places[0]).send_signal(signal.SIGCONT)
    until(lambda: not alive(int((frozen / "note").read_text().split()[0])))
    assert contents(frozen / "remote") == before
    assert verify(run.store).ok and verify(Store(two.place / places[0])).ok

    two.wait("seven")
    monkeypatch.setattr(client, "MAX_STARTS", 1)
    step, places = lose(two, Run(two, doomed), doomed, lambda worker: worker.kill())
    sentence = f"step held: the workers that ran it were lost, one after the other: {places[0]}"
    assert str(step.error) == sentence


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_run_ends_its_steps(two: Cluster, tmp_path: Path, how: signal.Signals) -> None:
    note = tmp_path / "note"
    (tmp_path / "remote").mkdir()
    arguments = [str(tmp_path / "store"), "holding", str(note), two.address, f"file://{tmp_path}/remote"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.builder", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    until(note.exists)
    process.send_signal(how)
    out, _ = process.communicate(timeout=200)
    if how == signal.SIGINT:
        assert process.returncode == 130
        statuses = {step["name"]: step["status"] for step in json.loads(out)["steps"]}
        assert statuses == {"quick": "built", "held": "skipped"}
    until(lambda: not any(alive(int(pid)) for pid in note.read_text().split()))
    assert all(two.named(name).poll() is None for name in ("one", "two"))


def test_what_no_worker_can_do_is_said_before_anything_runs(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    nodes: list[Node] = [
        Step("good", TEXT, {"text": "good"}, {}),
        Step("large", TEXT, {"text": "large"}, {}, memory=10**15),
        Step("old", TEXT, {"text": "old"}, {}, tools={"apache-tvm": "0.1"}),
        Step("other", TEXT, {"text": "other"}, {"of": Input("good")}, needs=("moonshine",)),
        Step("unlinked", TEXT, {"text": "u"}, {}, tools={"linker": "none"}),
    ]
    with pytest.raises(SetupError) as output:
        run(nodes)
    lines = str(output.value).splitlines()
    assert lines[0].startswith(
        "step large: it needs 1000000.0 GB of memory, and the most that a worker has is 2.0 GB"
    )
    assert lines[1].startswith("step old: no worker has 'apache-tvm 0.1', as here; they have 'apache-tvm 0.")
    assert lines[2].startswith("step unlinked: its key names the linker, and this machine has none")
    assert lines[3].startswith("step other: no worker has 'moonshine': start one with it")
    assert not run.places("good")
    result = run(nodes, keep_going=True)
    assert [step.status for step in result.steps if step.name == "good"] == ["built"]
    assert result.count("failed") == 4
    assert result.exit_code == SetupError.exit_code


def test_another_version_of_mlcbuild_is_refused(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "own_label", lambda: "mlcbuild 99")
    with pytest.raises(SetupError, match="no worker has mlcbuild 99, as here; they have mlcbuild 0"):
        Run(two, tmp_path)([Step("a", TEXT, {"text": "x"}, {})])


def test_labels_choose_the_worker_and_progress_comes_back(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    slow = Step("slow", "tests.actions:slow_progress", {}, {}, needs=("gpu", "fast"))
    result = run([slow, Step("here", "tests.actions:random", {}, {}, shared=False)])
    assert result.ok, [step.error for step in result.steps]
    assert {step.name: step.worker for step in result.steps} == {"slow": "two", "here": ""}
    results = [(e.done, e.total, e.unit) for e in run.events if isinstance(e, StepProgress)]
    assert results[-1] == (3, 3, "layers") and results == sorted(results)


def test_an_error_comes_back_with_its_class_and_log(two: Cluster, tmp_path: Path) -> None:
    run = Run(two, tmp_path)
    nodes: list[Node] = [
        Step("own", "tests.actions:fail", {"how": "own error"}, {}),
        Step("died", "tests.actions:fail", {"how": "9"}, {}),
    ]
    result = run(nodes, keep_going=True)
    errors = {step.name: step for step in result.steps}
    assert type(errors["own"].error).__name__ == "CheckpointError"
    assert str(errors["own"].error) == "model.safetensors: tensor a is missing"
    log = errors["own"].log
    assert log is not None and log.read_text().startswith("a line before the end\n")
    assert "was killed by SIGKILL" in str(errors["died"].error)
