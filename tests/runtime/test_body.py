"""Tests of request bodies: JSON with limits, and fields with a type, a range and a name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai import body
from mlcbuild_runtime.openai.body import RequestBody, parse_body, parse_json

TABLE: body.Table = {
    "size": body.integer(1, 9),
    "heat": body.number(0, 2),
    "on": body.boolean(),
    "text": body.text(),
    "options": body.structure(),
    "kind": body.choice("a", "b"),
    "anything": body.ignored("anything")["anything"],
    "best": body.neutral(best=(1, False))["best"],
    "min_tokens": body.integer(0),
}


def refused(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse_body(data)
    return str(caught.value)


def test_a_body_is_a_json_object() -> None:
    assert parse_body('{"a": [1, "é", null]}'.encode()) == {"a": [1, "é", None]}
    assert refused(b"[1]").startswith("the body must be a JSON object, found ")
    assert refused(b'{"a": 1').startswith("the body is not valid JSON: ")
    assert refused(b'{"a": "\xff"}') == "the body is not UTF-8: invalid start byte at byte 7"
    assert "valid JSON" in refused(b'{"a": NaN}') and "valid JSON" in refused(b'{"a": 1, "a": 2}')


def test_what_python_s_decoder_takes_and_nobody_can_process() -> None:
    assert "half of a surrogate pair" in refused(rb'{"a": ["\ud800"]}')
    assert parse_body(rb'{"a": "\ud83d\ude42"}') == {"a": "🙂"}
    assert parse_body(b'{"a": "1e999"}') == {"a": "1e999"}
    for vast in (b"1e999", b"1" + b"0" * 300 + b"e9", b"1" + b"0" * 210 + b"e99", b"1" * 310 + b".0"):
        assert refused(b'{"a": [1, %s]}' % vast) == "a[1] is a number that is too large: found inf"
    assert parse_body(b'{"a": [%s]}' % (b"1" + b"0" * 198 + b"e99")) == {"a": [1e297]}
    with pytest.raises(RequestError, match="size must be an integer from 1 to 9; found inf"):
        RequestBody(parse_body(b'{"size": 1e999}'), TABLE)


@pytest.mark.parametrize("depth", [body.MAX_DEPTH - 1, body.MAX_DEPTH, 5000, 200_000])
def test_nesting_has_a_limit(depth: int) -> None:
    data = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
    if depth < body.MAX_DEPTH:
        assert json.loads(data) == parse_body(data)
    else:
        assert re.search("nested too deeply|send less at a time", refused(data))


def test_values_are_counted_outside_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_VALUES", 100)
    monkeypatch.setattr(body, "MAX_FIELDS", 50)
    monkeypatch.setattr(body, "_WINDOW", 16)
    assert parse_body(json.dumps({"a": ',:[{\\"' * 500}).encode()) == {"a": ',:[{\\"' * 500}
    assert len(parse_json(json.dumps([0] * 99).encode())) == 99  # type: ignore[arg-type]
    many: list[Any] = [[0] * 101, {str(i): 0 for i in range(51)}, ["x," * 40] * 101]
    for value in many:
        with pytest.raises(RequestError, match="send less at a time") as caught:
            parse_json(json.dumps(value).encode(), "prompt")
        assert (caught.value.status, caught.value.param) == (413, "prompt")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 10}, "size must be an integer from 1 to 9; found 10"),
        ({"size": True}, "size must be an integer from 1 to 9; found True"),
        ({"size": 1.0}, "size must be an integer from 1 to 9; found 1.0"),
        ({"heat": -0.1}, "heat must be a number from 0 to 2; found -0.1"),
        ({"heat": "1"}, "heat must be a number from 0 to 2; found '1'"),
        ({"heat": True}, "heat must be a number from 0 to 2; found True"),
        ({"on": 1}, "on must be true or false; found 1"),
        ({"text": ["x"]}, "text must be a text; found ['x']"),
        ({"options": []}, "options must be an object; found []"),
        ({"kind": "c"}, 'kind must be "a" or "b"; found \'c\''),
        ({"best": 0}, "best is 0, which this server does not support: leave it out or send 1 or false"),
        ({"best": True}, "best is True, which this server does not support"),
        ({"sise": 3}, "unknown field 'sise'; did you mean 'size'?"),
        ({"max_tokens": 3}, "unknown field 'max_tokens'"),
        ({"x" * 500: 3}, f"unknown field '{'x' * 60}'"),
    ],
)
def test_each_field_is_checked_by_its_row(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        RequestBody(fields, TABLE)
    assert message in str(caught.value)
    if fields.keys() == {"max_tokens"}:
        assert "did you mean" not in str(caught.value), "min_tokens means the opposite"
    assert caught.value.param in (next(iter(fields)), "x" * 60)


def test_null_means_absent() -> None:
    fields = RequestBody(dict.fromkeys(TABLE), TABLE)
    assert (fields.integer("size"), fields.number("heat"), fields.text("text")) == (None, None, None)
    assert (fields.boolean("on", default=True), fields.object("options")) == (True, {})
    whole = RequestBody(
        {"size": 9, "heat": 2, "on": False, "text": "é", "best": False, "anything": []}, TABLE
    )
    assert (whole.integer("size"), whole.number("heat"), whole.boolean("on", True)) == (9, 2.0, False)
    assert isinstance(whole.number("heat"), float) and whole.get("anything") == []
    with pytest.raises(RequestError, match="text holds half of a surrogate pair at character 1"):
        RequestBody({"text": "a\ud800"}, TABLE).text("text")
