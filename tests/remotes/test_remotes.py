"""Tests of shared caches: which results two stores get from each other, and that a faulty cache cannot harm
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlcbuild.build.events import StepFetching
from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.build.plan import plan
from mlcbuild.store.upkeep import verify
from tests.caches import NGINX, WITHOUT_NGINX, nginx, serving
from tests.remotes.users import BUILT, CHAIN, REUSED, User, by_name, statuses, step


def test_a_new_remote_is_filled_by_the_next_run(tmp_path: Path) -> None:
    User(tmp_path / "one").run()
    with serving() as cache:
        first = User(tmp_path / "one", cache.url)
        assert statuses(first.run()) == REUSED
        assert f"sending 3 earlier results that {cache.url} may lack" in first.notes()
        assert statuses(User(tmp_path / "two", cache.url).run()) == REUSED
        count = len(cache.requests)
        assert statuses(first.run()) == REUSED and first.notes() == []
        assert len(cache.requests) == count, "the store remembers what the remote has"
        (ledger,) = (tmp_path / "one" / "sent").iterdir()
        ledger.write_bytes(b"\xff")
        assert statuses(first.run()) == REUSED and first.notes(), "a damaged ledger is as none"
        assert first.warnings() == []
    assert User(tmp_path / "one", cache.url, mode="read").run().ok


def test_what_one_user_builds_another_gets(url: str, tmp_path: Path) -> None:
    first, second = User(tmp_path / "one", url), User(tmp_path / "two", url)
    assert statuses(first.run()) == BUILT, first.warnings()
    assert first.warnings() == []
    planned = plan(CHAIN, second.store, sharing=second.sharing())
    assert [actual.state for actual in planned.steps] == ["remote"] * 3
    assert not (tmp_path / "two").exists(), "a plan writes nothing"
    result = second.run()
    assert statuses(result) == REUSED
    assert {actual.reason for actual in result.steps} == {f"from {url}"}
    assert second.text(result, "c") == "C\nB\nA"
    assert second.fetched() == ["c"], "nobody here reads the files of a and b"
    assert first.warnings() == second.warnings() == []
    assert verify(second.store).ok and verify(second.store).blobs == 1


def test_a_second_run_needs_no_remote(url: str, tmp_path: Path) -> None:
    User(tmp_path / "one", url).run()
    User(tmp_path / "two", url).run()
    alone = User(tmp_path / "two")
    assert statuses(alone.run()) == REUSED
    assert alone.fetched() == []


def test_a_run_without_its_remote_does_not_claim_to_fetch(url: str, tmp_path: Path) -> None:
    User(tmp_path / "one", url).run()
    User(tmp_path / "two", url).run()
    alone = User(tmp_path / "two")
    planned = plan(CHAIN, alone.store, sharing=alone.sharing())
    assert not planned.reads_remotes and planned["a"].state == "remote"
    assert planned["a"].reason == f"from {url}, which this run does not read"
    result = alone.run(options=Options(executor="inline", force=("c",)))
    assert statuses(result) == {"a": "built", "b": "built", "c": "built"}
    assert by_name(result)["b"].reason == "its files cannot be fetched: this run reads no remote"
    assert alone.fetched() == [] and alone.text(result, "c") == "C\nB\nA"


def test_a_step_that_runs_gets_the_files_it_reads_and_no_others(url: str, tmp_path: Path) -> None:
    created = step("made", "files", files={"a.json": "1", "b.bin": "2" * 1000})

    def graph(text: str) -> Graph:
        names = Step("names", "tests.actions:text", {"text": text}, {"some": Input("made", ("*.json",))})
        return Graph([created, names])

    User(tmp_path / "one", url).run(graph("x"))
    second = User(tmp_path / "two", url)
    result = second.run(graph("y"), Options())
    assert statuses(result) == {"made": "reused", "names": "built"}
    assert second.text(result, "names") == "y\n1"
    (fetching,) = [event for event in second.events if isinstance(event, StepFetching)]
    assert (fetching.name, fetching.size) == ("made", 1)
    assert [path.name for path in (second.store.root / "partial").iterdir()] == []


def test_steps_behind_a_changed_one_are_cut_off_early(url: str, tmp_path: Path) -> None:
    def graph(text: str) -> Graph:
        letter = Step("letter", "tests.actions:first_letter", {}, {"of": Input("of")})
        return Graph([step("of", text=text), letter, step("end", "text", "letter")])

    User(tmp_path / "one", url).run(graph("x1"))
    second = User(tmp_path / "two", url)
    result = second.run(graph("x2"))
    assert statuses(result) == {"of": "built", "letter": "built", "end": "reused"}
    assert by_name(result)["end"].reason == f"from {url}"


def test_what_holds_on_one_machine_only_never_leaves(tmp_path: Path) -> None:
    graph = Graph([step("a", text="A"), step("speed", "text", "a", shared=False, text="S")])
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(graph)
        assert len(cache.names("ac")) == 1
        asked = len(cache.requests)
        assert statuses(User(tmp_path / "two", cache.url).run(graph)) == {"a": "reused", "speed": "built"}
        assert len(cache.names("ac")) == 1
        assert {path for _, path in cache.requests[asked:]} == {*cache.names("ac"), cache.names("cas")[0]} | {
            path for method, path in cache.requests[asked:] if method == "GET"
        }


def test_modes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with serving() as cache:
        User(tmp_path / "1", cache.url, mode="read").run()
        User(tmp_path / "2", cache.url, ci_only=True).run()
        assert not any(method == "PUT" for method, _ in cache.requests)
        monkeypatch.setenv("CI", "true")
        User(tmp_path / "3", cache.url, ci_only=True).run()
        assert len(cache.names("ac")) == 3
        before = len(cache.requests)
        User(tmp_path / "4", cache.url, mode="write").run()
        assert not any(method == "GET" for method, _ in cache.requests[before:])
        assert not any(method == "PUT" for method, _ in cache.requests[before:]), "all of it is there"


def test_several_remotes_are_asked_in_order(tmp_path: Path) -> None:
    with serving() as near, serving() as far:
        User(tmp_path / "one", far.url).run()
        second = User(tmp_path / "two", near.url, far.url)
        assert {actual.reason for actual in second.run().steps} == {f"from {far.url}"}
        assert {path for _, path in near.requests} == {
            path for method, path in far.requests if "GET" in method
        }


def test_a_directory_is_left_without_rubbish(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "tmp").mkdir(parents=True)
    old, new = (root / "tmp" / (digit * 32) for digit in "01")
    old.write_text("left by a killed process")
    new.write_text("another process is at it")
    import os

    os.utime(old, (1, 1))
    assert User(tmp_path / "one", root.as_uri()).run().not_uploaded == {}
    assert [path.name for path in (root / "tmp").iterdir()] == [new.name]
    assert len(list((root / "ac").iterdir())) == len(list((root / "cas").iterdir())) == 3


def test_a_web_server_can_offer_a_shared_directory(tmp_path: Path) -> None:
    if NGINX is None:
        pytest.skip(WITHOUT_NGINX)
    with nginx(tmp_path / "nginx") as server:
        User(tmp_path / "one", server.root.as_uri()).run()
        assert statuses(User(tmp_path / "two", server.url, mode="read").run()) == REUSED


def test_options_keep_their_meaning(tmp_path: Path) -> None:
    with serving() as cache:
        User(tmp_path / "one", cache.url).run()
        forced = User(tmp_path / "two", cache.url).run(options=Options(executor="inline", force=("b",)))
        assert statuses(forced) == {"a": "reused", "b": "built", "c": "reused"}
        third = User(tmp_path / "three", cache.url)
        only = third.run(options=replace(Options(executor="inline"), only=("b",)))
        assert statuses(only) == {"a": "reused", "b": "reused"} and third.fetched() == ["b"]
