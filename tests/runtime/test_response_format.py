"""Tests of the field `response_format`: the constraint of each of its forms, and refused values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai.response_format import SPACES, response_format

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("value", [None, {"type": "text"}, {"type": "text", "other": 1}])
def test_plain_text_has_no_constraint(value: Any) -> None:
    assert response_format(value) is None


def test_schemas_become_text_that_limits_white_space() -> None:
    constraint = response_format(
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    )
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("json_schema", "response_format.json_schema.schema")
    document = json.loads(constraint.source)
    assert document["x-guidance"] == SPACES and document["properties"] == SCHEMA["properties"]
    anything = response_format({"type": "json_object"})
    assert anything is not None and anything.param == "response_format"
    assert json.loads(anything.source)["type"] == "object"


def test_an_object_may_have_a_schema_as_in_llama_cpp_s_server() -> None:
    constraint = response_format({"type": "json_object", "schema": SCHEMA})
    assert constraint is not None and constraint.param == "response_format.schema"
    assert json.loads(constraint.source)["properties"] == SCHEMA["properties"]
    constraint = response_format({"type": "json_object", "schema": {}})
    assert constraint is not None and json.loads(constraint.source)["type"] == "object"
    with pytest.raises(RequestError, match=r"response_format\.schema must be a JSON schema; found 'a'"):
        response_format({"type": "json_object", "schema": "a"})


@pytest.mark.parametrize(("schema", "refuses"), [(True, False), (False, True)])
def test_schemas_may_be_true_or_false(schema: bool, refuses: bool) -> None:
    constraint = response_format({"type": "json_schema", "json_schema": {"schema": schema}})
    assert constraint is not None and ("not" in json.loads(constraint.source)) is refuses


def test_expressions_and_grammars_are_passed_on() -> None:
    regex = response_format({"type": "regex", "regex": "a+"})
    grammar = response_format({"type": "grammar", "grammar": 'start: "a"'})
    assert regex is not None and grammar is not None
    assert (regex.kind, regex.source, regex.param) == ("regex", "a+", "response_format.regex")
    assert (grammar.kind, grammar.source, grammar.param) == (
        "lark",
        'start: "a"',
        "response_format.grammar",
    )


@pytest.mark.parametrize(
    "value",
    [
        "json_object",
        7,
        [],
        {},
        {"type": "json"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"schema": "object"}},
        {"type": "regex"},
        {"type": "regex", "regex": 1},
        {"type": "grammar", "grammar": None},
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="response_format") as caught:
        response_format(value)
    assert caught.value.param == "response_format" and caught.value.status == 400
