"""Closes the objects of a JSON schema for generating text: a model then writes no keys that the schema does
not name.

A schema without `additionalProperties` allows any further keys. For validating texts that is right. As a
grammar it lets a model continue with invented keys until the limit of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from mlcbuild_format.fields import Json

_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef"}
)
"""JSON Schema keywords that restrict or allow keys besides those in `properties`, or that combine an object's
schema with other schemas. A schema with one of them is not closed with `additionalProperties: false`."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""JSON Schema keywords whose value is an object, name -> a schema that may be closed."""
_LISTS = ("anyOf", "oneOf", "prefixItems")
"""JSON Schema keywords whose value is a list of schemas that may be closed: not those of `allOf`, which
describe one value together."""
_SINGLE = ("items", "additionalProperties", "contains", "unevaluatedItems")
_BESIDE = frozenset({"properties", "allOf", "anyOf", "oneOf", "$ref"})
"""The JSON Schema keyword `properties` and those that add further schemas for the same object (`allOf`,
`anyOf`, `oneOf`, `$ref`). If a schema has two of them, each describes only a part of the object's keys."""

Path = tuple[str, ...]
"""The place of a schema in the whole schema: the keys, and the indices as decimal text, that lead to it from
the outside to the inside."""


def closed(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a copy of a JSON schema in which objects with `properties`, at every depth, have no other keys,
    unless their schema mentions such keys.

    Objects that are composed of several schemas (`allOf`, or `anyOf` beside `properties`) are not changed,
    because each of their parts names only some of the keys. If a `$ref` in such a part leads out of the
    schema, to nothing, or to an `$id` or `$anchor`, nothing is changed.
    """
    composed = _composed(dict(schema))
    return dict(schema) if composed is None else _closed(schema, composed, (), True)


def _composed(schema: Json) -> frozenset[Path] | None:
    """Returns the places of those targets of `$ref` in a whole JSON schema that describe only a part of an
    object, such as the members of `allOf`, and the targets to which these refer in turn. Returns None if a
    target is not found."""
    targets, pending = set[Path](), list(_part_targets(schema))
    while pending:
        path = _pointer(pending.pop())
        if path in targets:
            continue
        part = None if path is None else _at(schema, path)
        if path is None or part is None:
            return None
        targets.add(path)
        pending += _part_targets(part, True)
    return frozenset(targets)


def _pointer(target: str) -> Path | None:
    """Returns the place to which `target`, the value of a `$ref` such as "#/$defs/a", points; None if it is
    no JSON pointer within the schema, which is "#" or begins with "#/"."""
    if target == "#":
        return ()
    if not target.startswith("#/"):
        return None
    names = unquote(target[2:]).split("/")
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)


def _at(schema: Json, path: Path) -> Json:
    """Returns the part of a JSON schema at `path`; None if there is none."""
    for name in path:
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _part_targets(schema: Json, part: bool = False) -> Iterator[str]:
    """Yields the targets, as written, of those `$ref` in a JSON schema that describe only a part of an
    object, such as the members of `allOf`. part: True if `schema` itself describes only a part."""
    if isinstance(schema, list):
        for item in schema:
            yield from _part_targets(item, part)
    if not isinstance(schema, dict):
        return
    part = part or _has_parts(schema)
    target = schema.get("$ref")
    if isinstance(target, str) and part:
        yield target
    for key, value in schema.items():
        inside = key in ("allOf", "not", "if", "then", "else", "dependentSchemas")
        yield from _part_targets(value, inside or (key in ("anyOf", "oneOf") and part))


def _has_parts(schema: Mapping[str, Json]) -> bool:
    return len(_BESIDE & schema.keys()) > 1


def _closed(
    schema: Mapping[str, Json], composed: frozenset[Path], path: Path, is_complete: bool
) -> dict[str, Json]:
    """Returns a JSON schema in which schemas of objects with `properties` forbid other keys, at every depth,
    unless they have a keyword about other keys, such as `additionalProperties`, or require a key that is not
    in `properties`. path: the place of `schema` in the whole schema; composed: places of schemas that
    describe only a part of an object and so are not closed; is_complete: False if another schema describes
    the same value as `schema`, which is then not closed either."""
    new, is_complete = dict(schema), is_complete and path not in composed
    for key, value in schema.items():
        inner = is_complete and not _has_parts(schema)
        if key in _MAPS and isinstance(value, dict):
            new[key] = {name: _part(item, composed, (*path, key, name), True) for name, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            alone = key == "prefixItems" or inner
            new[key] = [_part(item, composed, (*path, key, str(i)), alone) for i, item in enumerate(value)]
        elif key in _SINGLE:
            new[key] = _part(value, composed, (*path, key), True)
        elif key == "allOf" and isinstance(value, list):
            new[key] = [_part(item, composed, (*path, key, str(i)), False) for i, item in enumerate(value)]
    named, required = schema.get("properties"), schema.get("required", [])
    if (
        is_complete
        and isinstance(named, dict)
        and not _OPEN & schema.keys()
        and isinstance(required, list)
        and all(name in named for name in required)
    ):
        new["additionalProperties"] = False
    return new


def _part(value: Json, composed: frozenset[Path], path: Path, is_complete: bool) -> Json:
    return _closed(value, composed, path, is_complete) if isinstance(value, dict) else value
