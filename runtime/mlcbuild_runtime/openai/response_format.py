"""The field `response_format`, which constrains an answer to JSON, a regular expression or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mlcbuild_format.fields import Json

from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.openai.body import checked_text, wrong
from mlcbuild_runtime.openai.closed_schema import closed

KEY = "response_format"
SPACES: dict[str, Json] = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,40})?"}
"""Options of a JSON grammar that allow, between two tokens of JSON, at most one space, or a line break with
up to 40 characters of indentation: models that may write any white space write it for ever."""


def text_kind(key: str) -> Json:
    """Returns the JSON Schema of one form of a request's field `response_format`: an object whose field
    `type` is the text `key`, and which has a text in a field of the name `key`, such as {"type": "regex",
    "regex": "a+"} for `key` "regex"."""
    return {
        "type": "object",
        "required": ["type", key],
        "properties": {"type": {"const": key}, key: {"type": "string"}},
    }


SCHEMA: dict[str, Json] = {
    "anyOf": [
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {"schema": {"type": ["object", "boolean"]}},
                },
            },
        },
        text_kind("regex"),
        text_kind("grammar"),
    ]
}
"""JSON Schema of the field `response_format` of a request: plain text, any JSON object, JSON by a schema, a
regular expression, or a grammar."""


def response_format(value: Json) -> Constraint | None:
    """Returns the constraint that the field `response_format` of a request states; None for plain text.
    Raises RequestError for an invalid value; whether a schema, an expression or a grammar in it can be
    compiled is checked later."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"} if isinstance(value, dict):
            schema = value.get("schema")  # llama.cpp's server has it.
            if schema is None or schema == {}:
                return schema_constraint({"type": "object"}, KEY)
            if not isinstance(schema, dict):
                raise wrong(f"{KEY}.schema", "a JSON schema", schema)
            return schema_constraint(schema, f"{KEY}.schema")
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as stated}}:
            return schema_constraint(stated, f"{KEY}.json_schema.schema")
        case {"type": "json_schema"}:
            form = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
            raise wrong(KEY, f"{form} with a schema", value)
        case {"type": "regex", "regex": str(source)}:
            return Constraint("regex", checked_text(f"{KEY}.regex", source), f"{KEY}.regex")
        case {"type": "grammar", "grammar": str(source)}:
            return Constraint("lark", checked_text(f"{KEY}.grammar", source), f"{KEY}.grammar")
    kinds = '"text", "json_object", "json_schema", "regex" (with regex) or "grammar" (with grammar)'
    raise wrong(KEY, f"an object whose type is {kinds}", value)


def schema_constraint(schema: Mapping[str, Json] | bool, param: str) -> Constraint:
    """Returns the constraint that an answer must be JSON which the JSON schema `schema` accepts. The schema
    is not checked here. param: the request's field with the schema, which later errors name."""
    return Constraint("json_schema", schema_text(schema), param)


def schema_text(schema: Mapping[str, Json] | bool) -> str:
    """Returns a JSON schema as text, in the form that llguidance requires: its objects have no keys that the
    schema does not name, and white space is limited."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps({**closed(schema), "x-guidance": SPACES})
