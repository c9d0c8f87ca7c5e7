"""Reads, writes and constrains the arguments of tool calls in the syntax of Gemma's models: keys without
quotation marks, and a special mark on both sides of each string."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai.response_format import schema_text

_SCALARS = ("integer", "number", "boolean", "null")
_ANY: dict[str, Json] = {"type": [*_SCALARS]}
_WORD = re.compile(r"[^{}\[\],:<]+")


def write(value: Json, quote: str) -> str:
    """Returns a JSON value as Gemma's models write it in a tool call: with unquoted keys, with `quote` on
    both sides of each string, and without spaces after commas and colons. Keys and strings are not escaped,
    even if they contain `quote`."""
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{write(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(write(item, quote) for item in value) + "]"
        case str():
            return f"{quote}{value}{quote}"
    return json.dumps(value)


class BareReader:
    """Converts the arguments of one tool call, an object with bare (unquoted) keys, to JSON text, as parts of
    the text arrive."""

    def __init__(self, quote: str) -> None:
        self._quote, self._open, self._at_key = quote, list[str](), False

    def read(self, text: str) -> tuple[str, int]:
        """Reads more text of the object with a tool call's arguments, in which keys have no quotation marks.
        Returns (JSON text of the strings, numbers and punctuation that are complete, number of characters
        read). Reading stops after the object's closing brace; until then, the next call must begin with the
        characters that were not read."""
        written, at = "", 0
        while at < len(text):
            letter, word = text[at], _WORD.match(text, at)
            if text.startswith(self._quote, at):
                end = text.find(self._quote, at + len(self._quote))
                if end < 0:
                    break
                written += json.dumps(text[at + len(self._quote) : end], ensure_ascii=False)
                at = end + len(self._quote)
            elif self._quote.startswith(text[at:]) or (word is not None and word.end() == len(text)):
                break
            elif word is not None:
                written += json.dumps(word[0].strip(), ensure_ascii=False) if self._at_key else word[0]
                at = word.end()
            else:
                written += self._punctuation(letter)
                at += 1
                if not self._open:
                    break
        return written, at

    @property
    def is_complete(self) -> bool:
        """Returns True if the object with the arguments of the tool call has not begun, or if its closing
        brace has been read."""
        return not self._open

    def _punctuation(self, letter: str) -> str:
        if letter in "{[":
            self._open.append(letter)
        elif letter in "}]" and self._open:
            self._open.pop()
        self._at_key = letter in "{," and self._open[-1:] == ["{"]
        return letter + " " * (letter in ",:")


class BareRules:
    """Creates the rules of a Lark grammar that constrain arguments of tool calls with bare
    (unquoted) keys."""

    def __init__(self, quote: str, literal: Callable[[str], str]) -> None:
        """Creates those rules of the Lark grammar that do not depend on a schema: for strings, objects,
        arrays and other values. quote: text on both sides of each string. literal: function that returns a
        text as a Lark expression, with its special tokens."""
        self._mark, self._quote, self._literal = quote, literal(quote), literal
        end = "" if self._quote.startswith("<[") else "[lazy]"
        self.listed = [
            f"text: {self._quote} closed",
            f"closed{end}: LETTERS {self._quote}",
            r"LETTERS: /(.|\n)*/",
            f"any: text | %json {schema_text(_ANY)} | object | array",
            'object: "{" (pair ("," pair)*)? "}"',
            'array: "[" (any ("," any)*)? "]"',
            r'pair: /[^{}\[\],:<|"]+/ ":" any',
        ]
        """The rules of the Lark grammar so far, one text each. The Lark expressions for the arguments of tool
        calls refer to them by name."""

    def value(self, schema: Json) -> str:
        """Returns a Lark expression that matches the values which a JSON schema accepts; objects with
        `properties` may have only these, in the schema's order. Except for numbers, keywords other
        than `type`, `properties`, `required`, `items`, `enum`, `const` and `anyOf` are ignored, so that it
        may match more values. The rules to which the expression refers are added to `listed`."""
        if not isinstance(schema, dict):
            return "any"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return "(" + " | ".join(self._literal(write(value, self._mark)) for value in values) + ")"
        options = schema.get("anyOf")
        if isinstance(options, list):
            return "(" + " | ".join(self.value(option) for option in options) + ")"
        kinds = schema.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        return "(" + " | ".join(self._of_type(kind, schema) for kind in listed) + ")"

    def _of_type(self, kind: Json, schema: Mapping[str, Json]) -> str:
        properties = schema.get("properties")
        if kind == "string":
            return "text"
        if kind == "object" and isinstance(properties, dict):
            required = schema.get("required")
            return self._object(properties, required if isinstance(required, list) else [])
        if kind == "array":
            item = self.value(schema.get("items", True))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind in _SCALARS:
            return f"%json {schema_text({**schema, 'type': kind})}"
        return "object" if kind == "object" else "any"

    def _object(self, properties: Mapping[str, Json], required: list[Json]) -> str:
        """Returns a Lark expression that matches an object with these properties, in this order; an optional
        property may be left out together with its comma. properties: name -> JSON schema; required: names of
        the properties that are not optional. A rule for each property is added to `listed`."""
        later, first = "", ""
        for key, schema in reversed(list(properties.items())):
            name = f"p{len(self.listed)}"
            self.listed.append(name)
            self.listed[int(name[1:])] = f"{name}: {self._literal(f'{key}:')} {self.value(schema)}"
            if key in required:
                first, later = f"{name} {later}", f'"," {name} {later}'
            else:
                first = f"({name} {later} | {first})" if first else f"({name} {later})?"
                later = f'("," {name})? {later}'
        return f'"{{" {first} "}}"'
