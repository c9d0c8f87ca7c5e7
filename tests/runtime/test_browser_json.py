"""Tests of JSON answers in the browser's engine: its token masks are compared with those of the Python
runtime."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.openai.response_format import response_format

from .browser_engine import call, calls, tokenizer_files
from .grammars import SIZE, TINY, TOKENIZERS

PERSON = {
    "type": "object",
    "title": "A person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", 'q"\n', "größer"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "number"}}}]},
    },
    "required": ["age", "more"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v"],
        }
    },
}
OPEN = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "abc": {"type": "null"}, "é": {"const": 1}},
    "additionalProperties": {"type": "integer"},
    "required": ["abc"],
}
SCHEMAS: list[Any] = [
    PERSON,
    TREE,
    OPEN,
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    {"type": "object", "properties": {"a": {}, "b": True}, "additionalProperties": True},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "minItems": 1},
    {"type": "array", "maxItems": 0},
    {"enum": [1, 10, "x", None, True, -2.5, {"a": [1, {"b": []}]}, []]},
    {"type": "integer", "enum": [1, "a", 12]},
    {"const": "a/b \x7f é"},
    {"enum": ["😀", "a𝄞"]},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "number"},
    {"type": ["integer", "boolean", "string"]},
    {},
    True,
]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def walk(grammars: Grammars, value: Any, rng: random.Random, message: bool) -> tuple[list[int], list[Any]]:
    """Draws an answer at random under a constraint. Returns (its tokens; for each position the tokens that
    the Python runtime allows, and True if the constraint allows more than one next byte)."""
    constraint = response_format(value)
    assert constraint is not None
    matcher = grammars.compiled(constraint, message).matcher()
    tokens: list[int] = []
    places: list[Any] = []
    while True:
        if matcher.finished:
            return tokens, [*places, ([], True)]
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:SIZE]
        allowed = [int(token) for token in np.flatnonzero(bits)]
        places.append((allowed, matcher.free))
        text = [token for token in allowed if token not in ENDS]
        if not text or len(tokens) == 40:
            return tokens, places
        tokens.append(rng.choice(text))
        matcher.take(tokens[-1])


TOKENIZER = TOKENIZERS["json"]
ENDS = sorted(TOKENIZER.eos)


@pytest.mark.parametrize("message", [False, True])
def test_the_tokens_that_may_come_next_are_those_of_the_runtime(message: bool) -> None:
    rng = random.Random(5)
    grammars = Grammars(TOKENIZER.vocabulary, SIZE, ENDS)
    space = message and TOKENIZER.vocabulary.leading_space
    values = [{"type": "json_object"}, *map(form, SCHEMAS)]
    walks = [[walk(grammars, value, rng, message) for _ in range(8)] for value in values]
    asked = [
        [value, [tokens for tokens, _ in value_walks]]
        for value, value_walks in zip(values, walks, strict=True)
    ]
    files = tokenizer_files(TINY)
    actual = call("masks", {"formats": asked, "vocab": SIZE, "ends": ENDS, "space": space, **files})
    count = 0
    for value, value_walks, places in zip(values, walks, actual, strict=True):
        assert not isinstance(places, str), places
        for (tokens, expected), masks in zip(value_walks, places, strict=True):
            for index, ((allowed, free), mask) in enumerate(zip(expected, masks, strict=False)):
                prefix = TOKENIZER.decode(tokens[:index])
                where = (
                    json.dumps(value)[:90],
                    prefix,
                    [TOKENIZER.decode([t]) for t in set(mask) ^ set(allowed)],
                )
                # Where only one text may follow, the runtime allows its own spelling of it only.
                assert set(allowed) == set(mask) if free else set(allowed) <= set(mask), where
            assert len(masks) == len(expected)
            count += len(masks)
    assert count > 1500


def test_answers_are_what_their_schema_accepts() -> None:
    """Checks that random answers of the browser's engine are valid under their JSON schema, by the package
    jsonschema."""
    schemas = [schema for schema in SCHEMAS for _ in range(12)]
    asked = {"formats": [form(schema) for schema in schemas], "vocab": SIZE, "ends": ENDS, "limit": 3000}
    answers = call("answers", {**asked, **tokenizer_files(TINY)})
    texts = set()
    for schema, tokens in zip(schemas, answers, strict=True):
        assert len(tokens) < 3000, schema
        text = b"".join(map(TOKENIZER.vocabulary.token_bytes, tokens)).decode()
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        texts.add(text)
    assert len(texts) > len(schemas) / 2


REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "a+"}, "schema: 'pattern' is not supported in browsers: leave it out, or"),
    ({"properties": {"a": {"oneOf": [{}]}}}, "schema.properties.a: 'oneOf' is not supported in browsers"),
    ({"items": {"minimum": 3}}, "schema.items: 'minimum' is not supported in browsers"),
    ({"enum": [1], "minLength": 2}, "schema: 'minLength' beside 'enum' is not supported in browsers"),
    ({"$ref": "#/$defs/a"}, 'schema.$ref: "#/$defs/a" leads to nothing'),
    ({"$ref": "other.json"}, "schema.$ref: must begin with '#/', found \"other.json\""),
    ({"$ref": "#"}, "schema: a '$ref' leads to nothing but itself, so no text fits"),
    (
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"} | {"$id": "x"},
        "leads to nothing",
    ),
    ({"type": "text"}, "schema.type: must be object, array, string"),
    ({"type": []}, "schema.type: must be object, array, string"),
    ({"enum": []}, "schema.enum: must be a list that is not empty, found []"),
    ({"enum": ["a"], "type": "null"}, "schema: no value of 'enum' has the type \"null\""),
    ({"anyOf": {}}, "schema.anyOf: must be a list that is not empty, found {}"),
    ({"properties": []}, "schema.properties: must be an object of schemas, found []"),
    ({"required": "a"}, 'schema.required: must be a list of names, found "a"'),
    ({"required": ["a"]}, "schema.required: \"a\" is not in 'properties': add it there"),
    ({"minLength": -1}, "schema.minLength: must be a whole number from 0, found -1"),
    ({"minItems": 3, "maxItems": 2}, "schema: 'minItems' is 3 and 'maxItems' is 2, so no value fits"),
    (
        {"properties": {'a"': {}}, "additionalProperties": True},
        "needs escapes, so no other properties can be",
    ),
    (False, "schema: a schema must be an object or true here, found false"),
    ({"items": 3}, "schema.items: a schema must be an object or true here, found 3"),
    ({"enum": ["x" * 300_000]}, "schema: it has more than 262144 characters: simplify it"),
    ({"$ref": "#/%"}, "schema: it is nested too deeply or not well formed (URI malformed): simplify it"),
]


def test_what_is_not_supported_is_named() -> None:
    formats = [
        ({"type": "xml"}, 'response_format: must be {"type": "text"}'),
        ("json", "response_format: must be {"),
    ]
    cases = [*formats, *((form(schema), message) for schema, message in REFUSED)]
    asked = {"formats": [[value, [[]]] for value, _ in cases], "vocab": SIZE, "ends": ENDS, "space": False}
    actual = call("masks", {**asked, **tokenizer_files(TINY)})
    for (_, message), error in zip(cases, actual, strict=True):
        assert isinstance(error, str) and message in error, (message, error)
        assert "\n" not in error and error.startswith("response_format"), error
    shallow, deep = calls(("nested", {"depth": 50}), ("nested", {"depth": 20_000}))
    assert shallow == {"value": False}
    assert "schema: it is nested too deeply or not well formed (" in deep["error"], deep
