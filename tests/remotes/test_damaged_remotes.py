"""Tests of remotes whose results are damaged, forged or missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Graph
from mlcbuild.remotes import Remote
from mlcbuild.remotes.link import Link
from mlcbuild.store.upkeep import verify
from tests.caches import Cache, serving
from tests.remotes.conftest import KINDS
from tests.remotes.users import BUILT, REUSED, User, by_name, statuses, step


def spoil(data: bytes, how: str) -> bytes:
    if how == "flipped":
        at = max(0, len(data) - 2)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return {"short": data[:-1], "long": data + b"x", "empty": b"", "html": b"<html>not found</html>"}[how]


LIES = ("flipped", "short", "long", "empty", "html")
EVERY = "MLCBUILD_TEST_EVERY" in os.environ


def test_a_damaged_blob_is_refused_and_its_step_runs(
    url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Checks blobs that are damaged in a copy of a remote, in a different way for each kind of remote; with
    MLCBUILD_TEST_EVERY, in every way for each kind."""
    User(tmp_path / "one", url).run()
    own = LIES[KINDS.index(request.node.callspec.params["url"])]
    for how in LIES if EVERY else [own]:
        refuses_damaged_blobs(url, how, tmp_path / how)


def refuses_damaged_blobs(url: str, how: str, tmp_path: Path) -> None:
    with serving() as cache:
        copy_of(url, tmp_path, cache)
        for name in cache.names("cas"):
            cache.content[name] = spoil(cache.content[name], how)
        second = User(tmp_path / "two", cache.url)
        result = second.run(options=Options())
        assert statuses(result)["c"] == "built" and result.ok
        assert second.text(result, "c") == "C\nB\nA"
        assert "is refused: it" in second.warnings()[0]
        assert by_name(result)["c"].reason.startswith("its files cannot be fetched: no remote gives text.txt")
        third = User(tmp_path / "three", cache.url)
        assert third.run().ok and third.warnings() == [], "the second user's upload mended the cache"
    assert verify(second.store).ok


def copy_of(url: str, tmp_path: Path, cache: Cache) -> None:
    """Copies all records and blobs of a small build from the cache at `url` to the simulated cache `cache`,
    through a user who downloads everything."""
    link = Link(Remote(url))
    user = User(tmp_path / "copier", url)
    outputs = Options(executor="inline", outputs=("*",))
    result = user.run(options=outputs)
    for actual in result.steps:
        assert actual.record is not None
        data = link._small(f"ac/{actual.record.key}")
        assert data is not None
        cache.content[f"/ac/{actual.record.key}"] = data
        for _, digest, _ in actual.record.rows:
            cache.content[f"/cas/{digest}"] = user.store.blob(digest).read_bytes()


@pytest.mark.parametrize("how", LIES)
def test_a_damaged_record_is_refused_and_its_step_runs(
    how: str, address: Callable[[Cache], str], tmp_path: Path
) -> None:
    with serving() as cache:
        User(tmp_path / "one", address(cache)).run()
        for name in cache.names("ac"):
            cache.content[name] = spoil(cache.content[name], how)
        second = User(tmp_path / "two", address(cache))
        result = second.run()
        assert result.ok and second.text(result, "c") == "C\nB\nA"
        if how == "long":  # a line that is no signature says nothing
            assert statuses(result) == REUSED
        else:
            assert statuses(result) == BUILT
            assert all("is refused: " in warning for warning in second.warnings()[:3])
            assert second.warnings()[3:] == [
                f"{address(cache)} is not read again in this run: it holds damaged files; "
                "uploads to it continue and replace damaged files"
            ]


POISON: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "path": (lambda head, rest: head.update(files=[["../x", "0" * 64, 1]]), "it names the file '../x'"),
    "digest": (
        lambda head, rest: head.update(files=[["x", "../" * 21 + "x", 1]]),
        "the digest or the size of 'x'",
    ),
    "tree": (lambda head, rest: head.update(tree="0" * 64), "the digest of its tree does not follow"),
    "pre-image": (lambda head, rest: rest.update(params={"text": "Z"}), "its key does not follow"),
    "private": (lambda head, rest: rest.update(shared=False), "it is valid on one machine only"),
    "lacking": (lambda head, rest: rest.pop("code"), "its second line lacks a field"),
    "wrong types": (lambda head, rest: rest.update(inputs=[1]), "its inputs are not"),
    "measured": (lambda head, rest: rest.update(measured=["x", {}, []]), "its 'measured'"),
    "step": (lambda head, rest: rest.update(step={"a": [1]}), "its step is not a line of text"),
    "C1": (lambda head, rest: rest.update(step="a\x9b31m"), "its step is not a line of text"),
    "bidi": (lambda head, rest: head["files"][0].__setitem__(0, "a\u202eb"), "it names the file"),
    "size": (
        lambda head, rest: head["files"][0].__setitem__(2, float("inf")),
        "Infinity is not JSON",
    ),
    "float": (lambda head, rest: rest.update(params={"text": 1.5}), "it holds the number 1.5"),
}


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_record_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    graph = Graph([step("a", text="A")])
    change, words = POISON[name]
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(graph)
        (place,) = cache.names("ac")
        head, rest = (json.loads(line) for line in cache.content[place].splitlines())
        change(head, rest)
        cache.content[place] = b"".join(json.dumps(part).encode() + b"\n" for part in (head, rest))
        second = User(tmp_path / "two", cache.url)
        assert statuses(second.run(graph)) == {"a": "built"}
        (warning,) = second.warnings()
        assert f"{place.removeprefix('/ac/')} is refused: {words}" in warning


def test_a_record_under_another_key_is_refused(tmp_path: Path) -> None:
    with serving() as cache:
        User(tmp_path / "one", cache.url).run()
        first, second, _ = cache.names("ac")
        cache.content[first], cache.content[second] = cache.content[second], cache.content[first]
        user = User(tmp_path / "two", cache.url)
        result = user.run()
        assert result.ok and user.text(result, "c") == "C\nB\nA"
        assert any("its key does not follow" in warning for warning in user.warnings())


def test_a_missing_blob_has_its_step_run_and_those_before_it_fetched(tmp_path: Path) -> None:
    with serving() as cache:
        result = User(tmp_path / "one", cache.url).run()
        record = by_name(result)["c"].record
        assert record is not None
        del cache.content[f"/cas/{record.rows[0][1]}"]
        second = User(tmp_path / "two", cache.url)
        result = second.run(options=Options())
        assert statuses(result) == {"a": "reused", "b": "reused", "c": "built"}
        assert second.fetched() == ["c", "b"]
        cache.content = {name: data for name, data in cache.content.items() if "/cas/" not in name}
        third = User(tmp_path / "three", cache.url)
        assert statuses(third.run(options=Options())) == BUILT
        assert third.fetched() == ["c", "b", "a"]
    for user in (second, third):
        assert verify(user.store).ok and not any((user.store.root / "tmp").iterdir())
