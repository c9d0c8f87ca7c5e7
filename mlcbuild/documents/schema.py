"""The formats of recipes and targets, and checking a file against them in plain sentences.

The JSON files in mlcbuild/schema are the only definition of the formats; editors use them as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from mlcbuild.documents.document import Data, Document, Where, scalar
from mlcbuild.errors import Problem, did_you_mean

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


@dataclass(frozen=True)
class Finding:
    """One place of a document that does not fit its schema."""

    where: Where
    message: str
    on_key: bool = False
    """The key is wrong, not its value."""


def schema(name: Name) -> Schema:
    """The published schema, complete in itself: what `mlcbuild schema <name>` prints."""
    text = Path(__file__).parent.parent.joinpath("schema", f"{name}.schema.json").read_text(encoding="utf-8")
    found = cast(Schema, json.loads(text))
    definitions = found.get("$defs")
    if isinstance(definitions, dict) and "target" in definitions:
        definitions["target"] = {key: value for key, value in schema("target").items() if key != "$schema"}
    return found


def typed(document: Document, name: Name) -> Document:
    """The document with text wherever the schema wants nothing but text.

    So a model may be called 7 or 1.10 or true without quotes: its name is what was written.
    """
    texts = document.texts

    def convert(value: Data, where: Where, rule: Schema) -> Data:
        rules = list(_applicable(rule, _checker(name)[0]))
        if isinstance(value, dict):
            return {key: convert(item, (*where, key), _child(rules, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item, (*where, i), _child(rules, None)) for i, item in enumerate(value)]
        wanted = {kind for rule in rules for kind in _types(rule)}
        if where in texts and "string" in wanted and not wanted & {"integer", "number", "boolean"}:
            return texts[where]
        return value

    return replace(document, data=convert(document.data, (), _checker(name)[0]))


def findings(document: Document, name: Name) -> Iterator[Finding]:
    """Everything in a document that does not fit its schema, one by one: there may be many."""
    _, validator = _checker(name)
    return (item for error in validator.iter_errors(document.data) for item in _sentences(error))


def problems(document: Document, found: Iterable[Finding]) -> list[Problem]:
    """Findings with their places."""
    return [
        (document.key_place if item.on_key else document.place)(item.where).problem(item.message)
        for item in found
    ]


def described(value: object) -> str:
    """A value as a message shows it."""
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
    """The schema that holds once variables are replaced, and its validator."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    strict = cast(Schema, _without_variables(schema(name)))
    # jsonschema's stubs leave extend() untyped.
    own = {"pattern": _pattern, "uniqueItems": _unique, "$ref": _references(strict)}
    kind = extend(Draft202012Validator, own, type_checker=types)  # type: ignore[no-untyped-call]
    return strict, cast("Validator", kind(strict))


def _references(root: Schema) -> Callable[..., Iterator[ValidationError]]:
    """Returns the check of `$ref` in a schema whose references are all `#/...`.

    jsonschema resolves a reference anew for each value: a third of the time for thousands of models.
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
    """`$` as ECMAScript has it, whereas Python's also stands before a newline that ends the text."""
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not _expression(pattern).search(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _unique(_: Validator, __: bool, items: object, ___: object) -> Iterator[ValidationError]:
    """In linear time, whatever the items are."""
    from jsonschema.exceptions import ValidationError

    if isinstance(items, list) and len(items) > len({repr(item) for item in items}):
        yield ValidationError("an item stands twice")


def _without_variables(rule: Data) -> Data:
    """Numbers may be written as "${name}"; after substitution they must be numbers."""
    if isinstance(rule, list):
        return [_without_variables(item) for item in rule]
    if not isinstance(rule, dict):
        return rule
    kinds = rule.get("type")
    if isinstance(kinds, list) and kinds in (["integer", "string"], ["number", "string"]):
        rule = {key: value for key, value in rule.items() if key != "pattern"} | {"type": kinds[0]}
    return {key: _without_variables(value) for key, value in rule.items()}


def _applicable(rule: Schema, root: Schema) -> Iterator[Schema]:
    """A schema and those it refers to for the same value."""
    yield rule
    target = rule.get("$ref")
    if isinstance(target, str):
        yield from _applicable(_definition(root, target), root)
    if isinstance(rule.get("then"), dict):
        yield from _applicable(cast(Schema, rule["then"]), root)


def _definition(root: Schema, reference: str) -> Schema:
    """Returns what a reference such as `#/$defs/name` refers to."""
    part: Data = root
    for name in reference.removeprefix("#/").split("/"):
        part = part[name] if isinstance(part, dict) else None
    return cast(Schema, part)


def _child(rules: list[Schema], key: str | None) -> Schema:
    """The schema of the value under a key, or of the items of a list."""
    for rule in rules:
        known = rule.get("properties")
        child = rule.get("items") if key is None else None
        if key is not None:
            child = (
                known[key] if isinstance(known, dict) and key in known else rule.get("additionalProperties")
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


def _sentences(error: ValidationError) -> Iterator[Finding]:
    """One error of the validator as findings."""
    where: Where = tuple(error.absolute_path)
    rule = cast(Schema, error.schema)
    # The library types both as "perhaps unset": they are always set on an error that iter_errors() yields.
    value, limit = cast(Any, error.instance), cast(Any, error.validator_value)
    label, shown = _label(where), described(value)
    if "propertyNames" in error.absolute_schema_path:
        yield Finding((*where, value), f"the name {shown} {_demand(error, rule)}", on_key=True)
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(where, value, cast(Schema, rule["properties"]))
    elif error.validator == "required":
        for key in limit:
            if key not in value:
                message = f"{label} lacks the key '{key}'{_purpose(rule, key)}"
                yield Finding((*where, key), message, on_key=True)
    elif error.validator == "uniqueItems":
        yield from _repeated(where, value)
    elif error.validator in ("minLength", "minItems", "minProperties"):
        yield Finding(where, f"{label} must not be empty")
    else:
        shown = str(len(value)) if error.validator == "maxItems" else shown
        yield Finding(where, f"{label} {_demand(error, rule)}, not {shown}{_hint(value, rule)}")


def _demand(error: ValidationError, rule: Schema) -> str:
    """What the schema asks of a value."""
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
    """The first sentence about a key, to end another one with. Empty below an `if`, which only names it."""
    known = rule.get("properties")
    if not isinstance(known, dict):
        return ""
    about = str(cast(Schema, known[key])["description"]).split(". ")[0].removesuffix(".")
    return f": {about[0].lower()}{about[1:]}"


def _unknown_keys(where: Where, value: Mapping[str, Data], known: Schema) -> Iterator[Finding]:
    for key in value:
        if key not in known:
            message = f"the key {described(key)} is unknown in {_label(where)}; {did_you_mean(key, known)}"
            yield Finding((*where, key), message, on_key=True)


def _repeated(where: Where, items: list[Data]) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for i, item in enumerate(items):
        first = seen.setdefault(repr(item), i) + 1
        if first <= i:
            message = f"{described(item)} stands twice in {_label(where)}: it is item {first} too"
            yield Finding((*where, i), message)


def _hint(value: object, rule: Schema) -> str:
    """How to write a value that was read as text but was meant otherwise, or the other way round."""
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
