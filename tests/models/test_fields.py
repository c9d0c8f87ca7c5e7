"""Tests of reading the fields of a JSON object from an untrusted file: values, defaults, and reporting all
problems at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.models.fields import LARGEST, MOST_UNKNOWN, Fields, is_number, show


def fields(**values: Any) -> Fields:
    return Fields("config.json", values)


def only(reader: Fields) -> str:
    """Returns the one error message that a reader of config.json fields has collected, without the file's
    name. Fails if there is none or more than one."""
    (problem,) = reader.problems
    return problem.removeprefix("config.json: ")


@pytest.mark.parametrize(("value", "expected"), [(5, 5), (1, 1), (9, 9), (None, 3)])
def test_integers(value: Any, expected: int) -> None:
    reader = fields(a=value)
    assert reader.integer("a", 3, high=9) == expected and reader.integer("b", 3) == 3 and not reader.problems


@pytest.mark.parametrize("value", [0, 10, 2.0, True, "5", [1], LARGEST + 1])
def test_what_is_no_such_integer(value: Any) -> None:
    reader = fields(a=value)
    assert reader.integer("a", 3, high=9) == 1
    assert only(reader) == f"a: must be an integer from 1 to 9, found {show(value)}"
    assert not reader.sound("a") and reader.sound("b")


def test_a_field_without_a_default_must_be_there() -> None:
    reader = fields(a=None)
    assert reader.integer("a") == 1
    assert reader.number("b") == 1e12
    assert reader.numbers("c", 2) == (1.0, 1.0)
    assert [problem.split(": ")[1:] for problem in reader.problems] == [
        [name, "missing; it is needed to know the shape of the model"] for name in "abc"
    ]


@pytest.mark.parametrize("value", [2, 0.5, 3.0])
def test_numbers(value: Any) -> None:
    reader = fields(a=value)
    result = reader.number("a", 1.0, high=3.0)
    assert result == value and type(result) is float and not reader.problems


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 3.1, True, "1"])
def test_what_is_no_such_number(value: Any) -> None:
    reader = fields(a=value)
    assert reader.number("a", 1.0, high=3.0) == 3.0
    assert only(reader) == f"a: must be a number above 0, at most 3, found {show(value)}"


def test_null_turns_a_feature_off() -> None:
    reader = fields(a=None, b=4, c=0.5)
    assert (reader.maybe_integer("a", 7), reader.maybe_integer("b", 7), reader.maybe_integer("x", 7)) == (
        None,
        4,
        7,
    )
    assert (reader.maybe_number("a", 7), reader.maybe_number("c", 7), reader.maybe_number("x", 7)) == (
        None,
        0.5,
        7,
    )
    assert reader.has("b") and not reader.has("a") and not reader.has("x") and not reader.problems


def test_flags_and_choices() -> None:
    reader = fields(a=False, b=1, c="two", d="three", e=[])
    assert reader.flag("a", True) is False and reader.flag("x", True) is True
    assert reader.flag("b", True) is True and only(reader) == "b: must be true or false, found 1"
    values = {"one": 1, "two": 2}
    assert (reader.choice("c", values, "one"), reader.choice("x", values, "one")) == (2, 1)
    assert (reader.choice("d", values, "one"), reader.choice("e", values, "two")) == (1, 2)
    assert reader.problems[1].endswith('d: "three" is not supported; this family supports: one, two')
    assert len(reader.problems) == 3


def test_null_is_false_to_transformers() -> None:
    """Checks that null in config.json, by which transformers switches a feature off, is read as false for a
    flag whose default is false, and is reported as a problem for a flag whose default is true."""
    reader = fields(a=None)
    assert reader.flag("a", False) is False and not reader.problems
    assert reader.flag("a", True) is True and only(reader) == "a: must be true or false, found null"


def test_lists() -> None:
    reader = fields(a=[0, 1, 1], b=[0, 2], c=7, d=[1, 2], e=[1, 0], f=[1, 0.5], g=[1], h=[1, 1e9], i="7")
    assert reader.switches("a", [True] * 3) == [False, True, True]
    assert reader.integers("c", 2, 3) == [7, 7] and reader.integers("x", 2, 3) == [3, 3]
    assert reader.integers("d", 2, 3) == [1, 2]
    assert reader.numbers("f", 2) == (1.0, 0.5) and not reader.problems
    assert reader.switches("b", [True, False]) == [True, False] and not reader.sound("b")
    assert reader.switches("a", [True]) == [True]
    assert reader.integers("e", 2, 3) == [3, 3] and not reader.sound("e")
    assert reader.integers("d", 3, 3) == [3, 3, 3]
    assert reader.integers("i", 2, 3) == [3, 3] and not reader.sound("i")
    assert reader.numbers("g", 2) == (1.0, 1.0)
    assert reader.problems[-1].endswith("must be a list of 2 numbers, one per rotated pair; found 1 items")
    assert reader.numbers("h", 2) == (1.0, 1.0)
    assert reader.problems[-1].endswith("h[1]: must be a number from 1e-06 to 1e+06, found 1000000000.0")


@pytest.mark.parametrize("value", [[True, False], [1.0, 0]])
def test_switches_are_integers(value: list[object]) -> None:
    reader = fields(a=value)
    assert reader.switches("a", [False, True]) == [False, True]
    assert only(reader) == f"a: must be a list of 2 times 0 or 1, found {show(value)}"


def test_a_field_that_nobody_reads_is_a_problem() -> None:
    reader = fields(hidden=1, hiden=2, other=3, _note=4, plain=5)
    reader.integer("hidden")
    reader.ignore(["plain"])
    reader.ignore_private()
    reader.close("llama")
    first, second = reader.problems
    assert "hiden: unknown to llama and could change the results (value 2)." in first
    assert first.endswith("did you mean 'hidden'?") and "other: unknown" in second
    assert "did you mean" not in second


def test_many_unknown_fields_are_not_listed_one_by_one() -> None:
    reader = fields(**{f"f{i:03}": 0 for i in range(MOST_UNKNOWN + 9)})
    reader.close("llama")
    assert len(reader.problems) == MOST_UNKNOWN + 1
    assert reader.problems[-1].endswith("f050: unknown, like 8 more fields")


def test_fields_that_must_ask_for_nothing() -> None:
    reader = fields(a=1, b=True, c=False, d=0)
    reader.integer("d", low=0)
    reader.neutral({"a": (True,), "b": (True,), "c": (None, False), "d": (7,), "x": (1,)}, "llama")
    assert only(reader) == "a: llama supports only true, found 1"


def test_objects_inside() -> None:
    reader = fields(rope={"a": 0})
    inner = reader.inner("rope", {"a": 0})
    inner.integer("a")
    assert not reader.problems
    reader.adopt(inner)
    assert only(reader) == "rope.a: must be an integer from 1 to 2147483647, found 0"
    assert inner.inner("x", {}).inside == "rope.x."


def test_names_of_a_family() -> None:
    reader = fields(n_embd=8, hidden_size=8, n_head=0)
    shared = reader.respelled({"n_embd": "hidden_size", "n_head": "heads"}, {"layers": 5, "heads": 7})
    assert shared.integer("hidden_size") == 8 and shared.integer("layers") == 5
    shared.integer("heads")
    assert only(shared) == "n_head: must be an integer from 1 to 2147483647, found 0"
    twice = fields(n_embd=8, hidden_size=9).respelled({"n_embd": "hidden_size"}, {})
    assert only(twice) == "hidden_size: is 9, but n_embd is 8; keep one"
    ropes = fields(rope_scaling=None).respelled({}, {"rope_parameters": 1})
    assert not ropes.has("rope_parameters")


def test_all_problems_are_raised_together() -> None:
    reader = fields(a=0, b="x")
    reader.check()
    reader.integer("a")
    reader.integer("b")
    with pytest.raises(CheckpointError) as caught:
        reader.check()
    assert len(str(caught.value).splitlines()) == 2


def test_values_in_messages_are_short() -> None:
    assert show({"a": "é"}) == '{"a": "\\u00e9"}'
    assert len(show("x" * 100)) == 60 and show("x" * 100).endswith("...") and len(show("x" * 58)) == 60
    assert show(object()) == "a object"
    assert is_number(1) and is_number(0.5) and not is_number(True) and not is_number(10**400)
    assert not is_number(math.nan)
