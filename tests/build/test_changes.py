"""Tests of the messages that state how the inputs of two keys (their pre-images) differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlcbuild.build.changes import Change, compare, summary
from mlcbuild.canon import Entry, Json, Tree
from mlcbuild.store.records import Preimage

PLAIN = Preimage("a:f", {}, {}, {}, {})


def words(before: Preimage, after: Preimage, **labels: str) -> list[str]:
    return [str(change) for change in compare(before, after, labels)]


def params(**values: Json) -> Preimage:
    return replace(PLAIN, params=values)


def tree(**digests: str) -> Tree:
    return Tree.of([Entry(path, digest, 1) for path, digest in digests.items()])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a 1 -> 2"]),
        ({"a": "x"}, {"a": None}, ["a x -> null"]),
        ({}, {"a": True}, ["a is new (true)"]),
        ({"a": 1}, {}, ["a is gone"]),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, ["a: b[1].c 2 -> 3"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a: [1] is new (2)"]),
        ({"a": []}, {"a": {}}, ["a [] -> {}"]),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, ["a 1 -> 2", "b 1 -> 2"]),
    ],
)
def test_parameters_leaf_by_leaf(
    before: dict[str, Json], after: dict[str, Json], expected: list[str]
) -> None:
    assert words(params(**before), params(**after)) == expected


def test_everything_else_comes_in_a_fixed_order() -> None:
    before = Preimage("a:f", {"p": 1}, {"x.py": "1"}, {"tvm": "0.1"}, {"input": tree(f="1", g="1")})
    after = Preimage("a:g", {"p": 2}, {"x.py": "2"}, {"tvm": "0.2"}, {"input": tree(f="2", h="1")})
    assert words(before, after) == [
        "action a:f -> a:g",
        "p 1 -> 2",
        "tvm 0.1 -> 0.2",
        "input: f changed",
        "input: g is gone",
        "input: h is new",
        "x.py changed",
    ]


def test_labels_stand_for_parameters_and_arguments() -> None:
    before = replace(params(scheme={"bits": 4}), inputs={"source": tree(f="1")})
    after = replace(params(scheme={"bits": 8}), inputs={"source": tree(f="2")})
    expected = ["scheme q4: bits 4 -> 8", "checkpoint: f changed"]
    assert words(before, after, scheme="scheme q4", source="checkpoint") == expected


def test_an_input_that_is_new_has_new_files() -> None:
    assert words(PLAIN, replace(PLAIN, inputs={"source": tree(f="1")})) == ["source: f is new"]


def test_a_summary_has_a_limit() -> None:
    changes = tuple(Change(name, "1", "2", True) for name in "abcd")
    assert summary(changes) == "a 1 -> 2; b 1 -> 2; c 1 -> 2; and 1 more"
    assert summary(changes[:3]) == "a 1 -> 2; b 1 -> 2; c 1 -> 2"
    assert summary(changes, limit=1) == "a 1 -> 2; and 3 more"
    assert summary(()) == ""
