"""Tests of build plans: keys of steps, their states, and the reasons that a plan states for them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build.changes import Change
from mlcbuild.build.events import Event, SourceRead
from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Node, Source, Step, StepDisplay
from mlcbuild.build.plan import explain, plan
from mlcbuild.canon import Json, Tree, code_files, salt, step_key
from mlcbuild.errors import SourceError, UsageError
from mlcbuild.store.store import Store

INLINE = Options(executor="inline")
SCHEME: dict[str, Json] = {"bits": 4, "group_size": 32, "overrides": []}
TEXT = "tests.actions:text"


def weights(scheme: Json = None, *nodes: Node, **changes: object) -> Graph:
    step = Step(
        "weights/tiny/q4",
        TEXT,
        {"scheme": scheme or SCHEME},
        {"checkpoint": Input("fetch/tiny")} if nodes else {},
        tools={"apache-tvm": "0.27.0"},
        display=StepDisplay({"scheme": "scheme q4"}),
    )
    return Graph([*nodes, replace(step, **changes)])  # type: ignore[arg-type]  # fields by name


def reason(graph: Graph, store: Store, name: str = "weights/tiny/q4") -> str:
    return plan(graph, store)[name].reason


def test_a_first_plan_knows_what_runs_and_what_waits(store: Store) -> None:
    graph = Graph(
        [
            Step("a", TEXT, {}, {}),
            Step("b", TEXT, {}, {"x": Input("a")}),
            Step("c", TEXT, {}, {"x": Input("b")}),
        ]
    )
    actual = plan(graph, store)
    assert [(step.name, step.state, step.reason) for step in actual.steps] == [
        ("a", "run", "never built"),
        ("b", "pending", "waits for a"),
        ("c", "pending", "waits for b"),
    ]
    assert actual["a"].key is not None and actual["b"].key is None
    assert actual.count("pending") == 2
    assert not store.root.exists()  # a plan writes nothing


def test_a_plan_after_a_run_is_all_hits(store: Store) -> None:
    graph = Graph([Step("a", TEXT, {}, {}), Step("b", TEXT, {}, {"x": Input("a")})])
    execute(graph, store, INLINE)
    actual = plan(graph, Store(store.root))
    assert [(step.state, step.reason) for step in actual.steps] == [("hit", "")] * 2
    assert all(step.record is not None for step in actual.steps)


def test_the_key_is_made_of_the_documented_parts(store: Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    graph = weights(None, Source("fetch/tiny", tmp_path, ("f",)))
    salted = salt(code_files("tests.actions"), {"apache-tvm": "0.27.0"})
    params = graph.params["weights/tiny/q4"]
    result = execute(graph, store, INLINE).steps[0]
    assert result.record is not None
    files = result.record.info.preimage.inputs["checkpoint"].files
    assert [entry.path for entry in files] == ["f"]
    assert result.key == step_key(TEXT, params, salted, {"checkpoint": Tree.of(files).digest})
    assert result.record.info.preimage.key() == result.key


def test_names_labels_places_and_resources_never_enter_a_key(store: Store, tmp_path: Path) -> None:
    keys = set()
    for number, place in enumerate((tmp_path / "one", tmp_path / "two" / "deep")):
        place.mkdir(parents=True)
        (place / "f").write_text("same")
        display = StepDisplay({"scheme": f"words {number}"}, f"subject {number}", number)
        changes: dict[str, object] = {"display": display, "cores": number, "memory": number}
        changes["name"] = f"n{number}"
        graph = weights(None, Source("fetch/tiny", place, ("f",)), **changes)
        keys.add(plan(graph, store)[f"n{number}"].key)
    assert len(keys) == 1


def test_reasons_name_what_changed(store: Store) -> None:
    execute(weights(), store, INLINE)
    cases: list[tuple[Graph, str]] = [
        (weights({**SCHEME, "group_size": 64}), "scheme q4: group_size 32 -> 64"),
        (
            weights({**SCHEME, "overrides": [{"bits": 8}]}),
            "scheme q4: overrides is gone; scheme q4: overrides[0].bits is new (8)",
        ),
        (weights(tools={"apache-tvm": "0.27.1"}), "apache-tvm 0.27.0 -> 0.27.1"),
        (weights(tools={"apache-tvm": "0.27.0", "linker": "2"}), "linker is new (2)"),
        (weights(tools={}), "apache-tvm is gone"),
        (weights(params={"scheme": SCHEME, "extra": True}), "extra is new (true)"),
        (
            weights(params={}),
            "scheme q4: bits is gone; scheme q4: group_size is gone; scheme q4: overrides is gone",
        ),
        (weights({"bits": 8, "group_size": 1, "a": 1, "b": 2}), ""),
    ]
    for graph, expected in cases[:-1]:
        assert reason(graph, store) == expected
    assert reason(cases[-1][0], store).endswith("; and 2 more")
    other_action = reason(weights(action="tests.actions:names"), store)
    assert other_action == "action tests.actions:text -> tests.actions:names"


def test_reasons_name_changed_input_files_and_waiting(store: Store, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("x")
    graph = weights(None, Source("fetch/tiny", tmp_path, ("config.json", "model.safetensors")))
    execute(graph, store, INLINE)
    (tmp_path / "model.safetensors").write_text("changed")
    assert reason(graph, store) == "checkpoint: model.safetensors changed"
    assert reason(weights(None, Source("fetch/tiny", tmp_path, ("config.json",))), store) == (
        "checkpoint: model.safetensors is gone"
    )


def test_reasons_name_changed_source_files(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"acting_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("def act(params, inputs, out):\n    (out / 'f').write_text('1')\n")
    monkeypatch.syspath_prepend(tmp_path)
    graph = Graph([Step("a", f"{name}:act", {}, {})])
    assert execute(graph, store, INLINE).ok
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("# a comment counts as well\n")
    assert reason(graph, store, "a") == f"{name}.py changed"


def test_the_closest_recent_record_is_compared(store: Store) -> None:
    for size in (32, 64):
        execute(weights({**SCHEME, "group_size": size}), store, INLINE)
    tools = {"apache-tvm": "0.28"}
    execute(weights({**SCHEME, "group_size": 64}, tools=tools), store, INLINE)
    assert (
        reason(weights({**SCHEME, "group_size": 16}, tools=tools), store) == "scheme q4: group_size 64 -> 16"
    )
    assert reason(weights({**SCHEME, "group_size": 16}), store) == "scheme q4: group_size 64 -> 16"
    execute(weights(), store, INLINE)  # a hit is a use as well: now 32 is the latest
    assert reason(weights({**SCHEME, "group_size": 16}), store) == "scheme q4: group_size 32 -> 16"


def test_a_lost_record_and_lost_files_are_reasons(store: Store) -> None:
    result = execute(weights(), store, INLINE).steps[0]
    assert result.key is not None and result.record is not None
    blob = store.blob(result.record.files[0].digest)
    blob.unlink()
    assert reason(weights(), store) == "text.txt is missing from the store"
    (store.root / "ac" / result.key[:2] / result.key).unlink()
    assert reason(weights(), store) == "its record is gone from the store"


def test_force_and_only(store: Store) -> None:
    graph = Graph(
        [Step("a", TEXT, {}, {}), Step("b", TEXT, {}, {"x": Input("a")}), Step("c", TEXT, {"c": 1}, {})]
    )
    execute(graph, store, INLINE)
    actual = plan(graph, store, force=["a"])
    assert [(step.name, step.state, step.reason) for step in actual.steps] == [
        ("a", "run", "forced"),
        ("c", "hit", ""),
        ("b", "pending", "waits for a"),
    ]
    assert [step.name for step in plan(graph, store, only=["b"]).steps] == ["a", "b"]
    with pytest.raises(UsageError, match="no step is called 'x'"):
        plan(graph, store, force=["x"])
    with pytest.raises(UsageError, match="no step is called 'x'"):
        plan(graph, store, only=["x"])


def test_several_waits_are_counted(store: Store) -> None:
    inputs = {name: Input(name) for name in "abc"}
    graph = Graph([*(Step(name, TEXT, {"n": name}, {}) for name in "abc"), Step("d", TEXT, {}, inputs)])
    assert reason(graph, store, "d") == "waits for a and 2 more"


def test_select_narrows_what_enters_the_key(store: Store, tmp_path: Path) -> None:
    for name in ("a.json", "b.bin"):
        (tmp_path / name).write_text("x")
    graph = Graph(
        [
            Source("s", tmp_path, ("a.json", "b.bin")),
            Step("all", TEXT, {}, {"x": Input("s")}),
            Step("json", TEXT, {}, {"x": Input("s", ("*.json",))}),
        ]
    )
    before = plan(graph, store)
    (tmp_path / "b.bin").write_text("changed")
    after = plan(graph, store)
    assert before["all"].key != after["all"].key
    assert before["json"].key == after["json"].key


def test_every_unreadable_source_file_is_named(store: Store, tmp_path: Path) -> None:
    graph = Graph([Source("fetch/tiny", tmp_path, ("no.json", "none.bin"))])
    with pytest.raises(SourceError) as caught:
        plan(graph, store)
    assert str(caught.value).splitlines() == [
        f"fetch/tiny: {tmp_path}/no.json: No such file or directory",
        f"fetch/tiny: {tmp_path}/none.bin: No such file or directory",
    ]


def test_a_source_file_must_be_a_file(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    with pytest.raises(SourceError) as caught:
        plan(Graph([Source("s", tmp_path, ("pipe", "directory"))]), store)
    assert str(caught.value).splitlines() == [
        f"s: {tmp_path}/pipe: not a regular file",
        f"s: {tmp_path}/directory: not a regular file",
    ]


def test_reading_a_large_source_is_told_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlcbuild.build.plan._LARGE", 2)
    monkeypatch.setattr("mlcbuild.store.stamp.RACY_NS", -(10**12))
    for name in ("large", "x"):
        (tmp_path / name).write_text(name)
    graph = Graph([Source("s", tmp_path, ("large", "x"))])
    events: list[Event] = []
    for _ in range(2):
        plan(graph, Store(store.root), report=events.append)
    assert events == [SourceRead(tmp_path / "large", 5)]


def test_an_action_whose_module_is_absent_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match=r"step a: there is no module 'mlcbuild.absent' for its action"):
        plan(Graph([Step("a", "mlcbuild.absent:f", {}, {})]), store)


def test_explain_gives_every_difference(store: Store) -> None:
    execute(weights(), store, INLINE)
    planned, changes = explain(
        weights({"bits": 8, "group_size": 32, "a": {"b": None}}), store, "weights/tiny/q4"
    )
    assert planned.state == "run"
    assert changes == (
        Change("scheme q4: bits", "4", "8", True),
        Change("scheme q4: overrides", "[]", None, True),
        Change("scheme q4: a.b", None, "null", True),
    )
    graph = Graph([Step("a", TEXT, {}, {}), Step("b", TEXT, {}, {"x": Input("a")})])
    planned, changes = explain(graph, store, "b")
    assert (planned.reason, changes) == ("waits for a", ())
    with pytest.raises(UsageError, match="there is no step 'wrong'"):
        explain(graph, store, "wrong")


def test_a_record_with_a_damaged_second_line_is_none(store: Store) -> None:
    result = execute(weights(), store, INLINE).steps[0]
    assert result.key is not None
    path = store.root / "ac" / result.key[:2] / result.key
    first = path.read_bytes().partition(b"\n")[0]
    path.chmod(0o644)
    path.write_bytes(first + b'\n{"inputs":{}}\n')
    assert plan(weights(), store)["weights/tiny/q4"].state == "run"
    (warning,) = store.take_warnings()
    assert warning.startswith(f"{path}: the record is not used: its second line lacks a field")
    assert reason(weights({"bits": 8}), store) == "its record is gone from the store"


def test_sources_are_remembered_between_plans(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_text("x")
    os.utime(source, (1, 1))
    graph = weights(None, Source("fetch/tiny", tmp_path, ("f",)))
    assert execute(graph, store, INLINE).ok
    assert execute(graph, Store(store.root), INLINE).count("reused") == 1
