"""Validates recipes and targets by their JSON schemas, with readable messages.

The JSON files in mlcbuild/schema are the only definition of the formats; editors use them directly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from mlcbuild.documents.document import Data, Document, Where, scalar
from mlcbuild.errors import Problem, closest_name, did_you_mean

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

Name: TypeAlias = Literal["recipe", "target"]
Schema: TypeAlias = dict[str, Data]

_WORDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}

_COMPARED_KEYS = 20
"""Maximum number of unknown keys of one mapping that are compared with the keys of the schema, to find the
one that is meant."""


@dataclass(frozen=True)
class SchemaError:
    """A violation of a JSON schema (a record, not an exception): the path (keys and indices) of the value in
    the document, and the error message."""

    where: Where
    message: str
    on_key: bool = False
    """True if the violation concerns a key of a mapping, which is unknown, missing or malformed; False if it
    concerns a value, be it of a mapping or of a list."""
    is_misspelt: bool = False
    """True if a required key is absent because it is misspelt. No message is shown then: the one about the
    unknown key stands for both."""


def schema(name: Name) -> Schema:
    """Returns the JSON schema for recipes or targets as a new dictionary, as `mlcbuild schema <name>` prints
    it, without external references. name: "recipe" or "target"."""
    text = Path(__file__).parent.parent.joinpath("schema", f"{name}.schema.json").read_text(encoding="utf-8")
    document = cast(Schema, json.loads(text))
    definitions = document.get("$defs")
    if isinstance(definitions, dict) and "target" in definitions:
        definitions["target"] = {key: value for key, value in schema("target").items() if key != "$schema"}
    return document


def typed(document: Document, name: Name) -> Document:
    """Returns a new document in which every number or boolean that must be text according to the JSON schema
    `name` ("recipe" or "target") is replaced by its text in the file, which `document.texts` holds.

    So a model may be called 7 or 1.10 or true without quotes: its name is the text as written.
    """
    texts = document.texts

    def convert(value: Data, where: Where, rule: Schema) -> Data:
        rules = list(_applicable(rule, _checker(name)[0]))
        if isinstance(value, dict):
            return {key: convert(item, (*where, key), _child(rules, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item, (*where, i), _child(rules, None)) for i, item in enumerate(value)]
        types = {kind for rule in rules for kind in _types(rule)}
        if where in texts and "string" in types and not types & {"integer", "number", "boolean"}:
            return texts[where]
        return value

    return replace(document, data=convert(document.data, (), _checker(name)[0]))


def findings(document: Document, name: Name) -> Iterator[SchemaError]:
    """Returns the violations of a JSON schema in a document whose variables are substituted and whose scalars
    `typed` has converted: "${name}" in place of a number, and a number in place of text, are violations here.
    A missing key may come more than once. name: "recipe" or "target", the schema to use."""
    _, validator = _checker(name)
    return (item for error in validator.iter_errors(document.data) for item in _sentences(error))


def problems(document: Document, errors: Iterable[SchemaError]) -> list[Problem]:
    """Returns violations of a JSON schema as problems with line and column in the document's file. Keys that
    are absent because they are misspelt are left out."""
    return [
        (document.key_place if item.on_key else document.place)(item.where).problem(item.message)
        for item in errors
        if not item.is_misspelt
    ]


def described(value: object) -> str:
    """Returns a value of a recipe or target file as error messages show it, such as "'text'", "true",
    "nothing" for null, "a mapping" or "an empty list"; a text of more than 60 characters is cut to its first
    57 and "..."."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    text = str(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"'{text}'" if isinstance(value, str) else text


@lru_cache(maxsize=2)
def _checker(name: Name) -> tuple[Schema, Validator]:
    """Returns (JSON schema that a recipe or target file must satisfy after substitution of its variables, its
    validator). name: "recipe" or "target".
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    strict = cast(Schema, _without_variables(schema(name)))
    # jsonschema's stubs leave extend() untyped.
    keywords = {"pattern": _pattern, "uniqueItems": _unique, "$ref": _references(strict)}
    kind = extend(Draft202012Validator, keywords, type_checker=types)  # type: ignore[no-untyped-call]
    return strict, cast("Validator", kind(strict))


def _references(root: Schema) -> Callable[..., Iterator[ValidationError]]:
    """Returns a function that validates the keyword `$ref` in a JSON schema whose references are all `#/...`,
    and that resolves each reference only once.

    jsonschema resolves a reference anew for each value, which takes a third of the time for thousands of
    models.
    """
    targets: dict[str, Schema] = {}

    def check(validator: Validator, reference: str, value: object, _: object) -> Iterator[ValidationError]:
        target = targets.get(reference)
        if target is None:
            target = targets[reference] = _definition(root, reference)
        yield from validator.descend(value, target)  # type: ignore[attr-defined]

    return check


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\$$", r"\\Z", pattern))


def _pattern(_: Validator, pattern: str, value: object, __: object) -> Iterator[ValidationError]:
    """Validates the JSON schema keyword `pattern`, and yields an error if the value is text in which the
    pattern does not occur. A `$` at the end of the pattern matches only at the end of the text, as in
    ECMAScript; Python's also matches before a final newline."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not _expression(pattern).search(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _unique(_: Validator, __: bool, items: object, ___: object) -> Iterator[ValidationError]:
    """Validates the JSON schema keyword `uniqueItems` in linear time, and yields one error if items of a list
    are equal. Their texts in Python are compared: 1 and 1.0 are different, as are mappings with another order
    of keys."""
    from jsonschema.exceptions import ValidationError

    if isinstance(items, list) and len(items) > len({repr(item) for item in items}):
        yield ValidationError("an item stands twice")


def _without_variables(rule: Data) -> Data:
    """Returns a copy of a JSON schema that accepts no text "${name}" in place of a number: the type
    ["integer", "string"] or ["number", "string"] becomes the number alone, and its pattern is left out. Such
    references to variables are allowed only in a document whose variables have not been substituted yet."""
    if isinstance(rule, list):
        return [_without_variables(item) for item in rule]
    if not isinstance(rule, dict):
        return rule
    kinds = rule.get("type")
    if isinstance(kinds, list) and kinds in (["integer", "string"], ["number", "string"]):
        rule = {key: value for key, value in rule.items() if key != "pattern"} | {"type": kinds[0]}
    return {key: _without_variables(value) for key, value in rule.items()}


def _applicable(rule: Schema, root: Schema) -> Iterator[Schema]:
    """Yields a JSON schema, and the schemas under its `$ref` and `then`, and theirs, which apply to the same
    value (`then` without a look at its condition). root: the whole schema, in which references are
    resolved."""
    yield rule
    target = rule.get("$ref")
    if isinstance(target, str):
        yield from _applicable(_definition(root, target), root)
    if isinstance(rule.get("then"), dict):
        yield from _applicable(cast(Schema, rule["then"]), root)


def _definition(root: Schema, reference: str) -> Schema:
    """Returns the definition in a JSON schema that a reference such as `#/$defs/name` names, which must
    exist. root: the whole schema."""
    part: Data = root
    for name in reference.removeprefix("#/").split("/"):
        part = part[name] if isinstance(part, dict) else None
    return cast(Schema, part)


def _child(rules: list[Schema], key: str | None) -> Schema:
    """Returns the JSON schema of the value under `key` in a mapping, from `properties` or else
    `additionalProperties`, or, if `key` is None, of a list's items; {} if none is defined. rules: schemas
    that all apply to that mapping or list; the first with a definition counts."""
    for rule in rules:
        properties = rule.get("properties")
        child = rule.get("items") if key is None else None
        if key is not None:
            child = (
                properties[key]
                if isinstance(properties, dict) and key in properties
                else rule.get("additionalProperties")
            )
        if isinstance(child, dict):
            return child
    return {}


def _types(rule: Schema) -> list[str]:
    kinds = rule.get("type", [])
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else [str(kinds)]


def _label(where: Where) -> str:
    if not where:
        return "the file"
    last = where[-1]
    return f"item {last + 1} of {_label(where[:-1])}" if isinstance(last, int) else f"'{last}'"


def _sentences(error: ValidationError) -> Iterator[SchemaError]:
    """Translates one error of the JSON schema validator, and yields a SchemaError (path, readable message)
    for each violation in it."""
    where: Where = tuple(error.absolute_path)
    rule = cast(Schema, error.schema)
    # The library types both as "perhaps unset": they are always set on an error that iter_errors() yields.
    value, limit = cast(Any, error.instance), cast(Any, error.validator_value)
    label, shown = _label(where), described(value)
    if "propertyNames" in error.absolute_schema_path:
        yield SchemaError((*where, value), f"the name {shown} {_demand(error, rule)}", on_key=True)
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(where, value, cast(Schema, rule["properties"]))
    elif error.validator == "required":
        misspelt = _misspelt(value, rule)
        for key in limit:
            if key not in value:
                message = f"{label} lacks the key '{key}'{_purpose(rule, key)}"
                yield SchemaError((*where, key), message, on_key=True, is_misspelt=key in misspelt)
    elif error.validator == "uniqueItems":
        yield from _repeated(where, value)
    elif error.validator in ("minLength", "minItems", "minProperties"):
        yield SchemaError(where, f"{label} must not be empty")
    else:
        shown = str(len(value)) if error.validator == "maxItems" else shown
        yield SchemaError(where, f"{label} {_demand(error, rule)}, not {shown}{_hint(value, rule)}")


def _demand(error: ValidationError, rule: Schema) -> str:
    """Returns the rule of a JSON schema that a value violates, such as "must be at least 1", for the end of
    an error message. It has words only for the keywords that mlcbuild's schemas use; another one raises
    KeyError."""
    limit = cast(Any, error.validator_value)
    kind = str(error.validator)
    if kind == "type":
        return f"must be {' or '.join(_WORDS[name] for name in _types(rule))}"
    if kind == "enum":
        return f"must be {' or '.join(described(item) for item in limit)}"
    if kind == "pattern":
        return str(rule["patternErrorMessage"])
    phrases = {
        "const": f"must be {limit}",
        "minimum": f"must be at least {limit}",
        "maximum": f"must be at most {limit}",
        "maxItems": f"must have at most {limit} items",
        "maxLength": f"must have at most {limit} characters",
    }
    return phrases[kind]


def _purpose(rule: Schema, key: str) -> str:
    """Returns the first sentence of the description of a key in a JSON schema, such as ": the models to
    build", to be appended to an error message; "" if the schema has no `properties`. Raises KeyError if they
    lack the key, or its description."""
    properties = rule.get("properties")
    if not isinstance(properties, dict):
        return ""
    about = str(cast(Schema, properties[key])["description"]).split(". ")[0].removesuffix(".")
    return f": {about[0].lower()}{about[1:]}"


def _misspelt(value: Mapping[str, Data], rule: Schema) -> set[str | None]:
    """Returns the keys of a JSON schema that are probably meant by unknown keys of the mapping `value`,
    because they resemble them. The set also contains None if an unknown key resembles no key. Only the first
    20 unknown keys are compared."""
    # The only rule with required keys and without properties is the `else` of targets.
    properties = cast(Schema, rule.get("properties") or _checker("target")[0]["properties"])
    unknown = islice((key for key in value if key not in properties), _COMPARED_KEYS)
    return {closest_name(key, properties) for key in unknown}


def _unknown_keys(where: Where, value: Mapping[str, Data], properties: Schema) -> Iterator[SchemaError]:
    for key in value:
        if key not in properties:
            message = (
                f"the key {described(key)} is unknown in {_label(where)}; {did_you_mean(key, properties)}"
            )
            yield SchemaError((*where, key), message, on_key=True)


def _repeated(where: Where, items: list[Data]) -> Iterator[SchemaError]:
    first_index: dict[str, int] = {}
    for i, item in enumerate(items):
        first = first_index.setdefault(repr(item), i) + 1
        if first <= i:
            message = f"{described(item)} appears twice in {_label(where)}: it is item {first} too"
            yield SchemaError((*where, i), message)


def _hint(value: object, rule: Schema) -> str:
    """Returns the end of an error message with a hint how to write a value that YAML read as another type
    than intended, such as " (remove the quotes)"; "" if there is no hint."""
    if isinstance(value, dict) and list(value.values()) == [None] and "string" in _types(rule):
        return f' (put it in quotes: "{{{next(iter(value))}}}")'
    if not isinstance(value, str):
        return ""
    kinds = _types(rule)
    digits = value.replace("_", "").lstrip("0")
    if kinds == ["boolean"] and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f" (write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'})"
    if not set(kinds) & {"integer", "number"} or isinstance(scalar(value), bool | None):
        return ""
    if not isinstance(scalar(value), str):
        return " (remove the quotes)"
    return f" (write {digits})" if digits != value and isinstance(scalar(digits), int) and digits else ""
