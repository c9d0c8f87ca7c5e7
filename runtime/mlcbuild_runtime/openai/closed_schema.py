"""Closes the objects of a JSON schema for generating text: a model then writes no keys that the schema does
not name.

A schema without `additionalProperties` allows any further keys. For validating texts that is right. As a
grammar it lets a model continue with invented keys until the limit of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlcbuild_format.fields import Json

_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef"}
)
"""JSON Schema keywords that restrict or allow keys besides those in `properties`, or that combine an object's
schema with other schemas. A schema with one of them is not closed with `additionalProperties: false`."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""JSON Schema keywords whose value is an object: name -> schema."""
_LISTS = ("anyOf", "oneOf", "prefixItems")
"""JSON Schema keywords whose value is a list of schemas."""
_SINGLE = ("items", "additionalProperties", "contains", "unevaluatedItems")


def closed(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a schema in which objects with `properties` have no other keys, unless the schema mentions such
    keys.

    Objects that are composed of several schemas (`allOf`, or `anyOf` beside `properties`) are not changed,
    because each of their parts names only some of the keys.
    """
    return _closed(schema, frozenset(_composed(dict(schema))), "#", True)


def _composed(schema: Json, part: bool = False) -> Iterator[str]:
    """Yields the targets, as written, of those `$ref` in a JSON schema that describe only a part of an
    object, such as the members of `allOf`. part: True if `schema` itself describes only a part."""
    if isinstance(schema, list):
        for item in schema:
            yield from _composed(item, part)
    if not isinstance(schema, dict):
        return
    target = schema.get("$ref")
    if isinstance(target, str) and (part or "properties" in schema):
        yield target
    for key, value in schema.items():
        inside = key in ("allOf", "not", "if", "then", "else", "dependentSchemas")
        beside = key in ("anyOf", "oneOf") and ("properties" in schema or part)
        yield from _composed(value, inside or beside)


def _closed(
    schema: Mapping[str, Json], composed: frozenset[str], path: str, is_complete: bool
) -> dict[str, Json]:
    """Returns a JSON schema in which schemas of objects with `properties` forbid other keys, at every depth,
    unless they say something about other keys themselves, such as `additionalProperties` or a required key
    without a schema. path: the place of `schema` in the whole schema, a JSON pointer; composed: places, in
    the same form, of schemas that describe only a part of an object and so are not closed; is_complete: False
    if another schema describes the same value as `schema`, which is then not closed either."""
    new = dict(schema)
    for key, value in schema.items():
        inner = is_complete and "properties" not in schema
        if key in _MAPS and isinstance(value, dict):
            new[key] = {
                name: _part(item, composed, f"{path}/{key}/{name}", True) for name, item in value.items()
            }
        elif key in _LISTS and isinstance(value, list):
            alone = key == "prefixItems" or inner
            new[key] = [_part(item, composed, f"{path}/{key}/{i}", alone) for i, item in enumerate(value)]
        elif key in _SINGLE:
            new[key] = _part(value, composed, f"{path}/{key}", True)
        elif key == "allOf" and isinstance(value, list):
            new[key] = [_part(item, composed, f"{path}/{key}/{i}", False) for i, item in enumerate(value)]
    named, required = schema.get("properties"), schema.get("required", [])
    if (
        is_complete
        and path not in composed
        and isinstance(named, dict)
        and not _OPEN & schema.keys()
        and isinstance(required, list)
        and all(name in named for name in required)
    ):
        new["additionalProperties"] = False
    return new


def _part(value: Json, composed: frozenset[str], path: str, is_complete: bool) -> Json:
    return _closed(value, composed, path, is_complete) if isinstance(value, dict) else value
