"""Tests of the reader of strict JSON: it refuses duplicate keys and NaN, and reads everything else like
Python's json."""

from __future__ import annotations

import json
import time

import pytest
from mlcbuild_format.strict_json import JsonError, decoder, parse


@pytest.mark.parametrize("text", ['{"a": [1, -2.5e3, true, null], "é": {"a": "\\u0041"}}', "[]", '""', " 7 "])
def test_what_is_json_is_read_as_elsewhere(text: str) -> None:
    assert decoder()(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        ('{"x": [{"it\'s\\n": 1, "it\'s\\n": 2}]}', r"the key 'it\'s\n' is there twice"),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("\ufeff{}", "it begins with a byte order mark (BOM)"),
    ],
)
def test_what_readers_differ_about_is_refused(text: str, words: str) -> None:
    with pytest.raises(JsonError) as caught:
        decoder()(text)
    assert str(caught.value) == words


@pytest.mark.parametrize("text", ["", "{", "[1,]", "{'a': 1}", "01", '"\t"', "1 2"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decoder()(text)


def test_numbers_are_read_as_the_caller_wants() -> None:
    read = decoder(parse_int=lambda text: text, parse_float=lambda text: f"float {text}")
    assert read("[1, 1.50]") == ["1", "float 1.50"]


def test_a_duplicate_among_many_keys_is_named_in_linear_time() -> None:
    def seconds(count: int) -> float:
        pairs = ",".join(f'"{number}":0' for number in range(count))
        begun = time.process_time()
        with pytest.raises(JsonError, match=f"the key '{count - 1}' is there twice"):
            decoder()(f'{{{pairs},"{count - 1}":1}}')
        return time.process_time() - begun

    many, few = (min(seconds(count) for _ in range(3)) for count in (200_000, 20_000))
    assert many < 40 * few, "quadratic time is a hundred times as much"


def test_bytes_are_read_as_utf_8() -> None:
    assert parse('{"é": 1}'.encode()) == parse('{"é": 1}') == {"é": 1}
    with pytest.raises(UnicodeDecodeError):
        parse(b'"\xe9"')


def test_a_document_that_is_nested_too_deeply_is_a_json_error() -> None:
    with pytest.raises(JsonError, match="nested too deeply"):
        parse("[" * 200_000 + "]" * 200_000)
