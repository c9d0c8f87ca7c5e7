"""Tests of the syntax of records, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from mlcbuild.store import record_form
from mlcbuild.store.record_form import (
    Code,
    check_params,
    check_text,
    check_texts,
    check_tree,
    is_count,
    parse,
    parse_about,
    path_fault,
    read_rows,
)

D = "a" * 64


@pytest.mark.parametrize("path", ["a", "a/b.txt", "é", ".hidden", "a..b", "x" * 255])
def test_paths_that_a_record_may_name(path: str) -> None:
    assert path_fault(path) == ""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/a", "not a plain path"),
        ("a//b", "not a plain path"),
        ("a/../b", "not a plain path"),
        ("./a", "not a plain path"),
        ("a\\b", "a backslash"),
        ("a\nb", "a control character"),
        ("a\u202eb", "a control character"),
        ("x" * 256, "longer than"),
        ("é" * 128, "longer than"),
        ("/".join(["x" * 200] * 21), "longer than"),
        ("\ud800", "is not UTF-8"),
    ],
)
def test_paths_that_a_record_may_not_name(path: str, words: str) -> None:
    assert words in path_fault(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[]", "not two JSON objects"),
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not JSON, or not UTF-8"),
        (b'{"a": 1.5}', "the number 1.5, which is not whole"),
        (b'{"a": 1, "a": 1}', "repeats a key|twice"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "UTF-8|surrogate"),
    ],
)
def test_lines_that_are_no_record(line: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(line)


def test_an_object_is_parsed() -> None:
    assert parse(b'{"a": [1, null, "\\u00e9"]}') == {"a": [1, None, "é"]}


def test_source_files_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_form, "_codes", {})
    line = b'{"action":"m:f","code":{"a.py":"1"},"inputs":{},"n":%d}'
    first, second = parse_about(line % 1), parse_about(line % 2)
    third = parse_about(line % 3)
    assert [first["n"], second["n"], third["n"]] == [1, 2, 3]
    assert first["code"] == second["code"] == {"a.py": "1"} and second["code"] is third["code"]
    with pytest.raises(ValueError, match="repeats a key"):
        parse_about(b'{"action":"m:f","code":{"a.py":"1"},"inputs":{},"code":{}}')
    escaped = b'{"action":"m\\u003af","code":{"a.py":"1"},"inputs":{}}'
    assert parse_about(escaped)["action"] == "m:f"


def test_salts_are_computed_once_for_each_list_of_tools() -> None:
    code = Code({"a.py": "1"})
    first = code.salt((("tvm", "1"),))
    assert first == code.salt((("tvm", "1"),)) != code.salt((("tvm", "2"),))
    assert first != Code({"a.py": "2"}).salt((("tvm", "1"),)) and len(code._salts) == 2


def test_rows_are_paths_digests_and_sizes() -> None:
    assert read_rows([["a", D, 0], ["b", D, 7]]) == (("a", D, 0), ("b", D, 7))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({}, "not a list"),
        ([["a", D]], "not a path, a digest and a size"),
        ([["", D, 1]], "not a path"),
        ([[1, D, 1]], "not a path"),
        ([["a", D, True]], "the digest or the size of 'a'"),
        ([["a", D, -1]], "the digest or the size of 'a'"),
        ([["a", D, 1 << 62]], "the digest or the size of 'a'"),
        ([["a", "A" * 64, 1]], "the digest or the size of 'a'"),
    ],
)
def test_rows_that_are_malformed(rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rows(rows)


def test_a_tree_is_one_that_every_system_can_hold() -> None:
    check_tree([("a/b", D, 1), ("a/c", D, 1), ("d", D, 1)])
    for rows, words in (
        ([("a", D, 1), ("a", D, 1)], "the file 'a' twice"),
        ([("a/b", D, 1), ("a", D, 1)], "'a' as a file and as a directory"),
        ([("../a", D, 1)], "which is not a plain path"),
        ([("a/B", D, 1), ("a/b", D, 1)], "'a/B' and 'a/b', which are one file where case does not count"),
        ([("A/x", D, 1), ("a/y", D, 1)], "'A' and 'a', which are one file where case does not count"),
    ):
        with pytest.raises(ValueError, match=words):
            check_tree(rows)


def test_fields_of_text() -> None:
    check_text("step", "a/step")
    check_texts("tools", {"tvm": "1"})
    for value in ("", "a\nb", 1, "x" * 5000):
        with pytest.raises(ValueError, match="its step is not a line of text"):
            check_text("step", value)
    wrong: tuple[Any, ...] = ([], {"a": 1})
    for texts in wrong:
        with pytest.raises(ValueError, match="its tools does not map names to text"):
            check_texts("tools", texts)


def test_params_have_a_depth() -> None:
    deep: Any = 1
    for _ in range(98):
        deep = [deep]
    check_params({"a": deep})
    with pytest.raises(ValueError, match="nested too deeply"):
        check_params({"a": [[deep]]})
    with pytest.raises(ValueError, match="not a JSON object"):
        check_params([])


def test_counts_are_whole_and_bounded() -> None:
    assert is_count(0) and is_count((1 << 62) - 1)
    assert not any(is_count(value) for value in (-1, 1 << 62, True, 1.0, "1", None))
