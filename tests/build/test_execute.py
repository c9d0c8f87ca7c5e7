"""Running plans: early cut-off, failures, workers that die, budgets, signals, several processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from mlcbuild import machine, progress
from mlcbuild.build.events import (
    Event,
    RunResult,
    RunStarted,
    StepFinished,
    StepProgress,
    StepResult,
    StepStarted,
    StepWaiting,
    Warned,
)
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Source, Step
from mlcbuild.canon import Json
from mlcbuild.errors import CheckpointError, InputError, MlcbuildError, StepError, StoreError, UsageError
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify

TEXT = "tests.actions:text"
ROOT = Path(__file__).resolve().parent.parent.parent
INLINE = Options(executor="inline")
EXECUTORS: tuple[Literal["inline", "pool"], ...] = ("inline", "pool")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def step(
    name: str, function: str = "text", *needs: str, memory: int = 1, cores: int = 1, **params: Json
) -> Step:
    inputs = {need: Input(need) for need in needs}
    return Step(name, f"tests.actions:{function}", params, inputs, memory=memory, cores=cores)


def statuses(result: RunResult) -> dict[str, str]:
    return {step.name: step.status for step in result.steps}


def only(result: RunResult, name: str) -> StepResult:
    return next(step for step in result.steps if step.name == name)


def content(store: Store, result: RunResult, name: str) -> str:
    """Returns the text of a step's only file."""
    record = only(result, name).record
    assert record is not None
    (entry,) = record.files
    return store.blob(entry.digest).read_text()


def clean(store: Store) -> None:
    """Asserts that nothing of a run is left in the store but its results."""
    assert not any((store.root / "tmp").iterdir())
    assert not any((store.root / "locks").iterdir())
    assert verify(store).ok


@pytest.mark.parametrize("executor", EXECUTORS)
def test_steps_are_built_once_and_then_reused(store: Store, executor: Literal["inline", "pool"]) -> None:
    graph = Graph(
        [step("a", text="A"), step("b", "text", "a", text="B"), step("c", "text", "a", "b", text="C")]
    )
    events: list[Event] = []
    result = execute(graph, store, Options(executor=executor), events.append)
    assert statuses(result) == {"a": "built", "b": "built", "c": "built"}
    assert result.ok and result.exit_code == 0
    assert content(store, result, "c") == "C\nA\nB\nA"
    assert [e.result.name for e in events if isinstance(e, StepFinished)] == ["a", "b", "c"]
    again = execute(graph, Store(store.root), Options(executor=executor), events.append)
    assert again.count("reused") == 3
    assert [e for e in events if isinstance(e, RunStarted)] == [
        RunStarted(3, 0, {"a": 0.03, "b": 0.02, "c": 0.01}),
        RunStarted(3, 3, {}, frozenset("abc")),
    ]
    clean(store)


def test_a_run_stops_where_results_come_out_as_before(store: Store) -> None:
    def graph(text: str) -> Graph:
        return Graph(
            [
                step("a", text=text),
                step("of", "text", "a", text=text[0]),
                letter,
                step("end", "text", "letter"),
            ]
        )

    letter = Step("letter", "tests.actions:first_letter", {}, {"of": Input("of")})
    assert execute(graph("x1"), store, INLINE).ok
    result = execute(graph("x2"), store, INLINE)
    assert statuses(result) == {"a": "built", "of": "built", "letter": "built", "end": "reused"}
    assert only(result, "end").record is not None
    assert only(result, "letter").reason == "of: text.txt changed"


def test_inputs_hold_what_they_select(store: Store, tmp_path: Path) -> None:
    (tmp_path / "source.txt").write_text("user's")
    created = Step(
        "made", "tests.actions:files", {"files": {"a.json": "1", "b.bin": "2", "deep/c.json": "3"}}, {}
    )
    inputs = {
        "some": Input("made", ("*.json",)),
        "rest": Input("made", ("b.*", "deep/*")),
        "whole": Input("s"),
    }
    graph = Graph(
        [created, Source("s", tmp_path, ("source.txt",)), Step("names", "tests.actions:names", {}, inputs)]
    )
    result = execute(graph, store, INLINE)
    expected = "rest/b.bin\nrest/deep/c.json\nsome/a.json\nwhole/"
    assert content(store, result, "names").startswith(expected)


def test_a_failure_skips_what_needs_it_and_is_never_stored(store: Store) -> None:
    graph = Graph(
        [
            step("a"),
            step("bad", "fail", "a", how="own error"),
            step("c", "text", "bad"),
            step("d", "text", "c"),
        ]
    )
    for _ in range(2):
        result = execute(graph, store, INLINE)
        assert statuses(result)["bad"] == "failed"
    assert only(result, "c") == StepResult("c", "skipped", reason="needs bad, which failed")
    assert only(result, "d").reason == "needs bad, which failed"
    assert result.exit_code == 1 and not result.ok
    clean(store)


@pytest.mark.parametrize("keep_going", [False, True])
def test_keep_going_builds_what_does_not_need_the_failed_step(store: Store, keep_going: bool) -> None:
    others = [step(f"other{n}", text=str(n)) for n in range(3)]
    chained = [step("x", "text", "other0"), step("y", "text", "x")]
    graph = Graph([step("bad", "fail", how="own error"), *others, *chained])
    result = execute(graph, store, Options(executor="inline", keep_going=keep_going))
    rest = {status for name, status in statuses(result).items() if name != "bad"}
    assert ("skipped" in rest) is not keep_going
    if keep_going:
        assert rest == {"built"}
    else:
        assert only(result, "y").reason == "not started: bad failed"


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("own error", CheckpointError, "model.safetensors: tensor a is missing"),
        ("input error", InputError, "recipe.yaml:3:5: wrong"),
        ("python error", StepError, "step bad stopped with KeyError: 'no such thing'; traceback in {log}"),
        ("sys.exit", StepError, "step bad stopped with SystemExit: 2; traceback in {log}"),
        ("exit", StepError, "step bad: its worker process ended with exit code 7; log: {log}"),
        (
            str(int(signal.SIGTERM)),
            StepError,
            "step bad: its worker process was killed by SIGTERM (signal 15); log: {log}",
        ),
        (
            str(int(signal.SIGKILL)),
            StepError,
            "step bad: its worker process was killed by SIGKILL (signal 9), as the system does when memory "
            "runs out: try fewer --jobs or a smaller --memory; log: {log}",
        ),
    ],
)
def test_errors_come_back_in_words_and_the_run_goes_on(
    store: Store, how: str, kind: type[MlcbuildError], message: str
) -> None:
    events: list[Event] = []
    graph = Graph([step("bad", "fail", how=how), step("good", text="x")])
    result = execute(graph, store, Options(jobs=1, keep_going=True), events.append)
    failed = only(result, "bad")
    assert type(failed.error) is kind
    assert str(failed.error) == message.format(log=store.log("bad"))
    assert failed.log is not None and "a line before the end" in failed.log.read_text()
    (tail,) = [event.tail for event in events if isinstance(event, StepFinished) and event.tail]
    assert "a line before the end" in tail
    assert ("Traceback" in tail) == (how in {"python error", "sys.exit"})
    assert only(result, "good").status == "built"
    clean(store)


def test_a_native_crash_is_named(store: Store) -> None:
    result = execute(Graph([step("bad", "segfault")]), store)
    assert "was killed by SIGSEGV (signal 11)" in str(only(result, "bad").error)
    clean(store)


def test_an_action_that_is_not_there_fails_its_step(store: Store) -> None:
    result = execute(Graph([Step("a", "tests.actions:absent", {}, {})]), store, INLINE)
    assert "stopped with AttributeError: module 'tests.actions' has no attribute 'absent'" in str(
        result.steps[0].error
    )


def test_all_output_goes_to_the_log_native_output_too(
    store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    for executor in EXECUTORS:
        result = execute(Graph([step("n", "noisy", e=executor)]), store, Options(executor=executor))
        log = only(result, "n").log
        assert log is not None
        assert sorted(log.read_text().splitlines()) == ["from a child", "from native code", "from python"]
    assert capfd.readouterr() == ("", "")


def test_an_output_must_be_files(store: Store) -> None:
    result = execute(Graph([step("s", "symlink")]), store, INLINE)
    assert (
        str(result.steps[0].error)
        == "step s: its output link is not a regular file; actions write only files"
    )


def test_a_linked_file_of_the_users_is_not_touched(store: Store, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    assert execute(Graph([step("s", "outside_link", path=str(mine))]), store, INLINE).ok
    assert mine.stat().st_nlink == 1 and mine.stat().st_mode & 0o200


def test_an_assembled_output_shares_the_blobs_of_its_inputs(store: Store) -> None:
    graph = Graph([step("w", text="weights"), step("b", "link", "w")])
    result = execute(graph, store, INLINE)
    assert content(store, result, "b") == "weights"
    assert only(result, "b").record.files == only(result, "w").record.files  # type: ignore[union-attr]


def test_a_spoilt_input_is_refused_and_the_store_stays_whole(store: Store) -> None:
    graph = Graph([step("a", text="A"), Step("bad", "tests.actions:spoil_input", {}, {"of": Input("a")})])
    result = execute(graph, store, INLINE)
    assert str(only(result, "bad").error) == (
        "step bad: its input of/text.txt changed while the step ran; nothing was kept, run again"
    )
    assert content(store, result, "a") == "A"
    clean(store)


def test_a_source_that_changes_during_a_step_is_refused(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_text("x")
    bad = Step("bad", "tests.actions:spoil_source", {"path": str(source)}, {"s": Input("s")})
    result = execute(Graph([Source("s", tmp_path, ("f",)), bad]), store, INLINE)
    assert (
        str(result.steps[0].error)
        == f"step bad: {source} changed while the step ran; nothing was kept, run again"
    )


def test_code_that_changes_during_a_step_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"changing_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(
        f"from pathlib import Path\ndef act(params, inputs, out):\n    Path({str(path)!r}).write_text('')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = execute(Graph([Step("a", f"{name}:act", {}, {})]), store, INLINE)
    assert (
        str(result.steps[0].error)
        == f"step a: {name}.py changed while the step ran; nothing was kept, run again"
    )


def test_force_runs_a_step_again_and_tells_when_it_is_not_reproducible(store: Store) -> None:
    graph = Graph([step("steady", text="x"), step("random", "random"), step("after", "text", "random")])
    first = execute(graph, store, INLINE)
    events: list[Event] = []
    result = execute(graph, store, Options(executor="inline", force=("steady", "random")), events.append)
    assert statuses(result) == {"steady": "built", "random": "built", "after": "reused"}
    assert only(result, "random").record == only(first, "random").record  # the first record wins
    (warning,) = [event.message for event in events if isinstance(event, Warned)]
    assert warning.startswith("step random is not reproducible")


def test_only_runs_what_the_named_steps_need(store: Store) -> None:
    graph = Graph([step("a"), step("b", "text", "a"), step("c", text="c")])
    assert statuses(execute(graph, store, Options(executor="inline", only=("b",)))) == {
        "a": "built",
        "b": "built",
    }
    with pytest.raises(UsageError, match="no step is called 'z'"):
        execute(graph, store, Options(only=("z",)))


def test_a_damaged_blob_is_built_again_with_a_warning(store: Store) -> None:
    graph = Graph([step("a", text="A"), step("b", "text", "a")])
    first = execute(graph, store, INLINE)
    record = only(first, "a").record
    assert record is not None
    blob = store.blob(record.files[0].digest)
    blob.chmod(0o644)
    blob.write_text("B")
    events: list[Event] = []
    result = execute(graph, store, INLINE, events.append)
    assert statuses(result) == {"a": "built", "b": "reused"}
    assert only(result, "a").reason == "text.txt is damaged in the store"
    assert any(isinstance(event, Warned) and "was changed in the store" in event.message for event in events)
    assert content(store, result, "a") == "A"
    assert verify(store).ok


def test_workers_are_told_their_cores_and_have_one_order_of_sets(store: Store) -> None:
    result = execute(Graph([step("e", "environment", cores=8)]), store, Options(jobs=3))
    assert content(store, result, "e") == "3 0"


def test_temporary_files_of_actions_go_with_the_step(store: Store, tmp_path: Path) -> None:
    for executor in EXECUTORS:
        note = tmp_path / executor
        graph = Graph([step("r", "leave_rubbish", note=str(note))])
        assert execute(graph, store, Options(executor=executor)).ok
        assert not Path(note.read_text()).exists()
        clean(store)


def overlaps(log: Path) -> int:
    """Returns the most steps that ran at one time."""
    marks = []
    for line in log.read_text().splitlines():
        started, ended = map(float, line.split())
        marks += [(started, 1), (ended, -1)]
    running = peak = 0
    for _, change in sorted(marks):
        running += change
        peak = max(peak, running)
    return peak


@pytest.mark.parametrize(
    ("jobs", "memory", "needs", "expected"),
    [(4, 100, 10, 4), (1, 100, 10, 1), (4, 100, 60, 1), (4, 100, 50, 2), (4, 100, 1000, 1)],
)
def test_cores_and_memory_bound_what_runs_at_once(
    tmp_path: Path, *, jobs: int, memory: int, needs: int, expected: int
) -> None:
    store = Store(tmp_path / "store")
    log = tmp_path / "log"
    graph = Graph([step(f"s{n}", "interval", memory=needs, text=str(n), log=str(log)) for n in range(4)])
    assert execute(graph, store, Options(jobs=jobs, memory=memory)).ok
    assert overlaps(log) <= expected
    assert expected < 4 or overlaps(log) >= 2  # on a busy machine not all four need meet


def test_a_step_that_measures_runs_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = [step(f"s{n}", "interval", text=str(n), log=str(log)) for n in range(4)]
    graph = Graph([replace(actual, alone=True) for actual in steps])
    assert execute(graph, Store(tmp_path / "store"), Options(jobs=4)).ok
    assert overlaps(log) == 1


def test_a_step_with_the_key_of_a_running_one_waits_for_it(store: Store, tmp_path: Path) -> None:
    note = tmp_path / "note"
    same: dict[str, Json] = {"count": str(note), "text": "same", "sleep_ms": 300}
    # Equal by content only: the graph cannot know it, the keys do.
    first = [
        step("a", "files", files={"text.txt": "x"}),
        step("b", "files", files={"text.txt": "x"}, other=1),
    ]
    graph = Graph([*first, *(Step(f"use-{n}", TEXT, same, {"in": Input(n)}) for n in "ab")])
    events: list[Event] = []
    result = execute(graph, store, Options(jobs=4), events.append)
    assert sorted(only(result, f"use-{n}").status for n in "ab") == ["built", "reused"]
    assert note.read_text() == "same\n"
    assert not [event for event in events if isinstance(event, StepWaiting)]


def test_progress_reaches_the_reporter_and_nobody_outside_a_worker(store: Store) -> None:
    progress.report(1, 2, "layers")
    events: list[Event] = []
    execute(Graph([step("p", "slow_progress")]), store, None, events.append)
    observed = [event for event in events if isinstance(event, StepProgress)]
    assert observed[-1] == StepProgress("p", 3, 3, "layers")
    assert len(observed) >= 3


def test_peak_memory_and_time_are_recorded_and_estimated(store: Store) -> None:
    size = 150 << 20
    graph = Graph([step("m", "memory", bytes=size), step("t", text="x", sleep_ms=120)])
    result = execute(graph, store, Options(jobs=1))
    big, small = only(result, "m").record, only(result, "t").record
    assert big is not None and small is not None
    assert big.info.measured.peak_bytes >= size
    assert small.info.measured.milliseconds >= 120
    if sys.platform == "linux":  # elsewhere a kept worker knows only the peak of its life
        assert small.info.measured.peak_bytes < size
    events: list[Event] = []
    execute(graph, store, Options(executor="inline", force=("t",)), events.append)
    (started,) = [event for event in events if isinstance(event, StepStarted)]
    assert started.estimate is not None and started.estimate >= 0.12


def test_workers_are_kept_but_not_one_that_holds_much_memory(store: Store) -> None:
    large = step("b", "grow", "a", bytes=(1 << 30) + 1)
    result = execute(Graph([step("a", "grow", bytes=1), large, step("c", "grow", "b", bytes=1)]), store)
    pids = [content(store, result, name) for name in "abc"]
    assert pids[0] == pids[1] != pids[2]


def test_this_machine_has_something_to_share() -> None:
    assert machine.cores() >= 1
    assert machine.memory() > 100 << 20
    assert re.fullmatch(rf".+, {machine.cores()} cores", machine.kind())


def test_a_run_in_a_thread_works_without_signals(store: Store) -> None:
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(execute(Graph([step("a")]), store)))
    thread.start()
    thread.join()
    assert results[0].ok


def test_an_inline_run_stops_at_a_signal(store: Store) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result = execute(
        Graph([step("a", text="x"), step("s", "send_signal", "a"), step("z", "text", "s")]),
        store,
        replace(INLINE, handle_signals=True),
    )
    assert result.interrupted == "SIGTERM" and result.stopped == ("s",) and result.exit_code == 130
    assert statuses(result) == {"a": "built", "s": "skipped", "z": "skipped"}
    assert only(result, "z").reason == "interrupted by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    clean(store)


# Other processes


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
        process.wait()  # an orphan would keep the pipes open: not to be waited for
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
    """Files are limited to 64 kB for this process and its workers: writing more fails as on a full disk."""
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
