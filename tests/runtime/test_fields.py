"""Tests of reading untrusted JSON documents and their fields: values, and the messages of refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from mlcbuild_format.fields import (
    LONGEST_MESSAGE,
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_TEXT,
    FieldError,
    Fields,
    describe,
    parse_json,
    plain,
    printable,
)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d\\ude42"]}',
        "7",
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        "9" * 100,
    ],
)
def test_documents_are_read_as_elsewhere(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
        (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
        (b"9" * 101, f"the number {'9' * 100}... is too large"),
        (b"1e999", "the number 1e999 is too large"),
        (b'"\\ud800"', "a string holds half of a surrogate pair"),
        (b'{"\\udfff": 1}', "a string holds half of a surrogate pair"),
        *(
            (
                b"[" * 65 + value + b"]" * 65,
                "it is nested too deeply: at most 64 lists and objects within each other",
            )
            for value in (b"1", b"")
        ),
        (b'{"a":' * 100_000, "it is nested too deeply"),
    ],
)
def test_documents_that_readers_differ_about(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r"^.*$") as caught:
        parse_json(data)
    assert str(caught.value) == words


VALUES: dict[str, Any] = {
    "line": "a line",
    "break": "a\nb",
    "escape": "\x1b[2J",
    "empty": "",
    "long": "x" * (MAX_TEXT + 1),
    "true": True,
    "seven": 7,
    "minus": -1,
    "huge": MAX_INTEGER + 1,
    "half": 0.5,
    "null": None,
    "list": ["a", "b"],
    "mixed": ["a", 1],
    "numbers": [0, 5],
    "inner": {"deep": "", "n": 1},
}
FIELDS = Fields(VALUES, "'file'")


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda f: f.text("line"), "a line"),
        (lambda f: f.text("line", "a [a-z]+"), "a line"),
        (lambda f: f.integer("seven", 7, 7), 7),
        (lambda f: f.texts("list"), ("a", "b")),
        (lambda f: f.integers("numbers", 5), (0, 5)),
        (
            lambda f: (f.number("half", 0, 1), f.number("null", 0, 1), f.number("absent", 0, 1)),
            (0.5, None, None),
        ),
        (lambda f: f.object("inner")["n"], 1),
        (lambda f: f.fields("inner").integer("n", 0), 1),
        (lambda f: f.only(*VALUES) is f, True),
    ],
)
def test_fields_of_the_right_type(read: Callable[[Fields], Any], value: Any) -> None:
    assert read(FIELDS) == value


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda f: f.text("absent"), "'file.absent' is missing"),
        (
            lambda f: f.text("seven"),
            "'file.seven' must be a non-empty string of at most 1000 printable characters",
        ),
        (lambda f: f.text("break"), "'file.break' must be a non-empty string of"),
        (lambda f: f.text("escape"), "'file.escape' must be a non-empty string of"),
        (lambda f: f.text("empty"), "'file.empty' must be a non-empty string of"),
        (lambda f: f.text("long"), "'file.long' must be a non-empty string of"),
        (lambda f: f.text("line", "a"), "'file.line' must be a string of the form a, found 'a line'"),
        (lambda f: f.integer("true", 0), "'file.true' must be an integer of at least 0, found True"),
        (lambda f: f.integer("half", 0), "'file.half' must be an integer of at least 0, found 0.5"),
        (lambda f: f.integer("minus", 0), "'file.minus' must be an integer of at least 0, found -1"),
        (lambda f: f.integer("huge", 0), f"'file.huge' must be an integer of at most {MAX_INTEGER}, found"),
        (lambda f: f.texts("line"), "'file.line' must be a list of strings, found 'a line'"),
        (lambda f: f.texts("mixed"), "'file.mixed.1' must be a non-empty string of"),
        (lambda f: f.integers("mixed"), "'file.mixed' must be a list of integers from 0 to"),
        (
            lambda f: f.integers("numbers", 4),
            "'file.numbers' must be a list of integers from 0 to 4, found [0, 5]",
        ),
        (lambda f: f.number("true", 0, 1), "'file.true' must be a number from 0 to 1, found True"),
        (lambda f: f.number("seven", 0, 1), "'file.seven' must be a number from 0 to 1, found 7"),
        (lambda f: f.object("list"), "'file.list' must be an object, found ['a', 'b']"),
        (lambda f: f.fields("inner").text("deep"), "'file.inner.deep' must be a non-empty string"),
        (lambda f: f.fields("inner").only("n"), "unknown field 'file.inner.deep'"),
        (lambda f: Fields([], ""), "the document must be an object, found []"),
        (lambda f: Fields({}).text("a\x1b"), "'a\\x1b' is missing"),
    ],
)
def test_fields_of_a_wrong_type(read: Callable[[Fields], Any], words: str) -> None:
    with pytest.raises(FieldError) as caught:
        read(FIELDS)
    assert str(caught.value).startswith(words) and len(str(caught.value)) < 250


def test_texts_of_strangers_are_one_printable_line() -> None:
    assert printable("a\n\x1b\u202e\ud800é") == "a\\n\\x1b\\u202e\\ud800é"
    assert printable("x" * 9, 8) == "xxxxx..."
    assert len(printable("x" * 10**6)) == LONGEST_MESSAGE


def test_values_are_described_shortly_whatever_their_size() -> None:
    assert describe({"a": [1, "b", None]}) == "{'a': [1, 'b', None]}"
    assert describe(1 << 5000) == "an integer of 5001 bits"
    for value in (["x"] * 10**6, "x" * 10**6, {str(i): i for i in range(10**5)}):
        assert len(describe(value)) == 60
    source, choices = random.Random(1), list[Any]([1, "a", None, True, 0.5, [], {}])
    for _ in range(200):
        listed = [source.choice(choices) for _ in range(source.randrange(6))]
        assert describe(listed) == repr(listed)


def test_a_plain_copy() -> None:
    value = MappingProxyType({"a": (1, [2, {"b": None}]), 3: "x"})
    assert plain(value) == {"a": [1, [2, {"b": None}]], "3": "x"}
    with pytest.raises(TypeError, match="JSON cannot hold a set"):
        plain({"a": {1}})
