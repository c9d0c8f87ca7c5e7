"""Tests of the execution of plans: early cut-off, failing steps, crashing workers, budgets of memory,
signals, and several processes."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from mlcbuild import progress
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
from mlcbuild.errors import CheckpointError, InputError, MlcbuildError, StepError, UsageError
from mlcbuild.store.store import Store
from mlcbuild.store.upkeep import verify
from tests.build.runs import INLINE, clean, only, statuses, step

TEXT = "tests.actions:text"


EXECUTORS: tuple[Literal["inline", "pool"], ...] = ("inline", "pool")


def content(store: Store, result: RunResult, name: str) -> str:
    """Returns the text of the only file in the result of the step `name`."""
    record = only(result, name).record
    assert record is not None
    (entry,) = record.files
    return store.blob(entry.digest).read_text()


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
    if sys.platform == "linux":  # elsewhere only the peak of a worker's whole life is known
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
