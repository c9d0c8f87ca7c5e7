"""Tests of closing the objects of a JSON schema: it changes the meaning of a schema only by excluding
additional keys."""

from __future__ import annotations

import json

import jsonschema
import pytest
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import RequestBody
from mlcbuild_runtime.openai.closed_schema import closed
from mlcbuild_runtime.openai.response_format import schema_constraint
from mlcbuild_runtime.openai.tools import toolbox

from .grammars import drawn

INTEGER: Json = {"type": "integer", "minimum": 0, "maximum": 9}
A: dict[str, Json] = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B: dict[str, Json] = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
X: Json = {"$ref": "#/$defs/x"}
SHUT: dict[str, Json] = {**A, "additionalProperties": False}
COMPOSED: list[dict[str, Json]] = [
    {"allOf": [X, B], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A}},
    {"allOf": [X, B], "$defs": {"x": {"anyOf": [A, {"type": "null"}]}}},
    {"allOf": [X, B], "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": A}},
    {**B, "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A}},
    {"allOf": [{"$ref": "#/$defs/x~1y"}, B], "$defs": {"x/y": A}},
    {"allOf": [{"$ref": "#/$defs/x%5By%5D"}, B], "$defs": {"x[y]": A}},
    {"allOf": [{"$ref": "x"}, B], "$defs": {"x": {**A, "$id": "x"}}},
    {"allOf": [B], "anyOf": [A, {"type": "null"}]},
]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": A}, {**A, "additionalProperties": SHUT}),
        ({**A, "patternProperties": {"^x": A}}, {**A, "patternProperties": {"^x": SHUT}}),
        ({**A, "required": ["a", "z"]}, {**A, "required": ["a", "z"]}),
        ({"type": "array", "items": A}, {"type": "array", "items": SHUT}),
        ({"prefixItems": [A]}, {"prefixItems": [SHUT]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({"const": A}, {"const": A}),
        ({"items": X, "$defs": {"x": A}}, {"items": X, "$defs": {"x": SHUT}}),
        ({"allOf": [X, B], "$defs": {"x": A}}, {"allOf": [X, B], "$defs": {"x": A}}),
    ],
)
def test_objects_are_closed(schema: dict[str, Json], expected: dict[str, Json]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize("schema", COMPOSED)
def test_parts_of_an_object_stay_open(schema: dict[str, Json]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize("seed", range(4))
def test_generated_objects_have_their_own_keys_once(seed: int) -> None:
    nested: dict[str, Json] = {"type": "object", "properties": {"in": A, "b": INTEGER}, "required": ["in"]}
    pairs = json.loads(drawn(schema_constraint(nested, "x"), seed), object_pairs_hook=list)
    assert [key for key, _ in pairs] in (["in"], ["in", "b"])


def test_a_function_without_a_schema_has_no_parameters() -> None:
    body: dict[str, Json] = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    box = toolbox(RequestBody(body, api.CHAT))
    assert box is not None
    assert drawn(schema_constraint(box.tools[0].parameters, "x")).replace(" ", "").strip() == "{}"
    jsonschema.Draft202012Validator.check_schema(dict(box.tools[0].parameters))
