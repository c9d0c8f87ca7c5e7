"""Tests of the published JSON schemas: they are valid, complete and correct, and they explain every key."""

from __future__ import annotations

import re

import yaml

from mlcbuild.documents import schema
from mlcbuild.documents.document import Data
from mlcbuild.recipe import RequestedLimits, outputs
from tests.recipes import HEAD, project, readme_recipes

__all__ = ["project"]


def test_the_schema_is_valid_and_explains_every_key() -> None:
    from jsonschema import Draft202012Validator

    actual = schema.schema("recipe")
    Draft202012Validator.check_schema(actual)
    assert actual["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    keys = list(_properties(actual, "recipe"))
    assert len(keys) > 30
    for where, rule in keys:
        assert rule.get("description"), where
    assert not re.search(r'"\$ref": "(?!#)', str(actual).replace("'", '"')), "complete in itself"


def _properties(rule: Data, where: str) -> list[tuple[str, dict[str, Data]]]:
    results: list[tuple[str, dict[str, Data]]] = []
    if isinstance(rule, dict):
        for key, value in rule.items():
            if key == "properties" and isinstance(value, dict):
                results += [
                    (f"{where}.{name}", item) for name, item in value.items() if isinstance(item, dict)
                ]
            results += _properties(value, f"{where}.{key}")
    elif isinstance(rule, list):
        for item in rule:
            results += _properties(item, where)
    return results


def test_the_published_schema_accepts_what_load_accepts() -> None:
    """Checks that the published schema accepts every recipe of the guides, also with variables in place of
    numbers, so that editors can use it."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema.schema("recipe"))
    for text in readme_recipes():
        validator.validate(yaml.safe_load(text))
    assert not validator.is_valid(yaml.safe_load(HEAD + "compile: {max_batch: 'x'}"))
    assert not validator.is_valid(yaml.safe_load(HEAD + "modles: {}"))


def test_examples_and_defaults_in_the_schema_are_true() -> None:
    from jsonschema import Draft202012Validator

    actual = schema.schema("recipe")
    for where, rule in [*_properties(actual, "recipe"), *_properties(schema.schema("target"), "target")]:
        whole = {**rule, "$defs": actual["$defs"]}
        examples = rule.get("examples", [])
        assert isinstance(examples, list)
        for example in [*examples, *([rule["default"]] if "default" in rule else [])]:
            assert Draft202012Validator(whole).is_valid(example), (where, example)
    assert _default(actual, "prefill_chunk") == RequestedLimits().prefill_chunk
    assert _default(actual, "max_batch") == RequestedLimits().max_batch
    assert _default(actual, "output", "bundle") == outputs.DEFAULT


def _default(actual: dict[str, Data], key: str, parent: str = "compile") -> Data:
    (rule,) = [rule for where, rule in _properties(actual, "") if where.endswith(f"{parent}.{key}")]
    return rule["default"]
