"""Tests of tool call arguments with unquoted keys: they are written, and read back in pieces of any size."""

from __future__ import annotations

import json
import random

import pytest
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.bare_arguments import BareReader, write

QUOTE = '<|"|>'
VALUES: list[dict[str, Json]] = [
    {},
    {"city": "Berlin"},
    {"a": 1, "b": -2.5e-3, "c": True, "d": None},
    {"nested": {"list": [1, "two", {"three": []}], "empty": {}}, "last": "x"},
    {"text": 'braces {}[] , : "quotes" \\ and\nlines', "more": "ünïcode 東京"},
    {"two words": ["", " ", "a:b"]},
]


def read(text: str, sizes: random.Random | None = None) -> tuple[str, str]:
    """Reads the arguments of a tool call, with unquoted keys, by a parser that receives them in pieces.
    Returns (the arguments as JSON text, the rest of the text after them). sizes: generator of random sizes of
    the pieces; None: one piece."""
    reader, written, buffer, at = BareReader(QUOTE), "", "", 0
    while at < len(text):
        size = len(text) if sizes is None else sizes.randrange(1, 8)
        buffer += text[at : at + size]
        at += size
        more, count = reader.read(buffer)
        written, buffer = written + more, buffer[count:]
        if written and reader.is_complete:
            return written, buffer + text[at:]
    assert not reader.is_complete
    return written, buffer


@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_is_read(value: dict[str, Json]) -> None:
    text = write(value, QUOTE)
    assert json.loads(read(text)[0]) == value
    for seed in range(20):
        assert json.loads(read(text, random.Random(seed))[0]) == value


def test_the_form_of_gemma() -> None:
    text = '{city:<|"|>Paris<|"|>,days:[1,2],now:true}'
    assert write({"city": "Paris", "days": [1, 2], "now": True}, QUOTE) == text
    assert read(text)[0] == '{"city": "Paris", "days": [1, 2], "now": true}'
    assert read("{ city : 1 , other : 2 }")[0] == '{"city":  1 , "other":  2 }'


def test_reading_stops_after_the_object() -> None:
    for seed in range(10):
        written, rest = read("{a:{b:1}}<end>{c:2}", random.Random(seed))
        assert json.loads(written) == {"a": {"b": 1}} and rest == "<end>{c:2}"


def test_half_of_a_mark_and_of_a_word_wait() -> None:
    reader = BareReader(QUOTE)
    assert reader.read('{a:<|"') == ('{"a": ', 3)
    assert reader.read('<|"|>hal') == ("", 0)
    assert reader.read('<|"|>half<|"|>,b:12') == ('"half", "b": ', 17)
    assert reader.read("12") == ("", 0), "more digits may follow"
    assert reader.read("12}") == ("12}", 3) and reader.is_complete


def test_closing_marks_without_an_opening_one() -> None:
    assert BareReader(QUOTE).read("}") == ("}", 1)
