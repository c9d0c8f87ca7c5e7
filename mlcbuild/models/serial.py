"""Writes and reads a ModelConfig as JSON without floats, and computes its digest.

Objects have the fields of their dataclasses. Fields that hold their default are left out, so that a new field
moves no digest. A mixer (attention), a feed-forward and a norm also have a `kind`. Equal layers are written
once: `layer_specs` lists the different ones in the order of their first layers, `layers` an index for each
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mlcbuild.canon import Json, digest
from mlcbuild.errors import CheckpointError
from mlcbuild.models.config import ModelConfig, faults
from mlcbuild.models.fields import show
from mlcbuild.models.layers import FEED_FORWARDS, MIXERS, LayerNorm, LayerSpec, RmsNorm

KINDS: Mapping[type, str] = {
    **{block: entry.kind for table in (MIXERS, FEED_FORWARDS) for block, entry in table.items()},
    RmsNorm: "rms",
    LayerNorm: "layer",
}
"""Class that describes a kind of attention, feed-forward or norm -> value of the field `kind` that marks it
in JSON."""
LAYERS, SPECS = "layers", "layer_specs"


def to_json(config: ModelConfig) -> dict[str, Json]:
    """Returns a model config as a JSON object. Floats are written as texts, the shortest that are read back
    as the same number."""
    places = {spec: index for index, spec in enumerate(dict.fromkeys(config.layers))}
    document = _object(config, except_for=LAYERS)
    document[SPECS] = [_plain(spec) for spec in places]
    document[LAYERS] = [places[layer] for layer in config.layers]
    return document


def config_digest(config: ModelConfig) -> str:
    return digest("model-config/2", to_json(config))


def from_json(values: object, place: str = "model config") -> ModelConfig:
    """Parses a model config from the JSON object that `to_json` wrote, and returns it. place: the beginning
    of each error message. Raises CheckpointError for anything else."""
    try:
        config = _config(values)
    except ValueError as error:
        raise CheckpointError(f"{place}: not a model config of mlcbuild: {error}") from None
    if sentences := faults(config):
        raise CheckpointError("\n".join(f"{place}: {fault}" for fault in sentences))
    if to_json(config) != values:
        raise CheckpointError(
            f"{place}: not a model config as mlcbuild writes it: fields with their default, and layer_specs"
            " that are equal, unused or out of order, must be left out"
        )
    return config


def _plain(value: object) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _object(value)


def _object(value: object, except_for: str = "") -> dict[str, Json]:
    assert is_dataclass(value)
    document: dict[str, Json] = {"kind": KINDS[type(value)]} if type(value) in KINDS else {}
    for field in dataclass_fields(value):
        item = getattr(value, field.name)
        if field.name != except_for and (field.default is MISSING or item != field.default):
            document[field.name] = _plain(item)
    return document


def _config(values: object) -> ModelConfig:
    if not isinstance(values, Mapping):
        raise ValueError(f"config must be an object, found {show(values)}")
    rest = {**values}
    specs = _list(LayerSpec, rest.pop(SPECS, None), f"config.{SPECS}")
    indices = _list(int, rest.pop(LAYERS, None), f"config.{LAYERS}")
    if any(index >= len(specs) for index in indices):
        raise ValueError(f"config.{LAYERS} has an index beyond the {len(specs)} {SPECS}")
    layers = tuple(specs[index] for index in indices)
    config: ModelConfig = _dataclass(ModelConfig, rest, "config", {LAYERS: layers})
    if not config.family.isidentifier():
        raise ValueError(f"config.family: must be the name of a family, found {show(config.family)}")
    return config


def _dataclass(kind: Any, values: object, name: str, ready: Mapping[str, object] | None = None) -> Any:
    """Reads a JSON object as an instance of the dataclass `kind`. name: path of the object, for messages;
    ready: field name -> value for fields that were read already. Raises ValueError for a missing, unknown or
    invalid field."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be an object, found {show(values)}")
    rest, arguments = {**values}, {**(ready or {})}
    if kind in KINDS and (tag := rest.pop("kind", None)) != KINDS[kind]:
        raise ValueError(f"{name}.kind must be {KINDS[kind]}, found {show(tag)}")
    for field, (hint, is_required) in _hints(kind).items():
        if field in rest:
            arguments[field] = _value(hint, rest.pop(field), f"{name}.{field}")
        elif is_required and field not in arguments:
            raise ValueError(f"{name} has no '{field}'")
    if rest:
        raise ValueError(f"{name} has an unknown '{min(map(str, rest))}'")
    return kind(**arguments)


@cache
def _hints(kind: type) -> dict[str, tuple[Any, bool]]:
    """Returns field name -> (type, True if the field has no default) for a dataclass."""
    types = get_type_hints(kind)
    return {field.name: (types[field.name], field.default is MISSING) for field in dataclass_fields(kind)}


def _value(hint: Any, value: object, name: str) -> object:
    """Converts a JSON value to the type `hint`, and returns it. name: the value's path in the document, for
    messages. Raises ValueError for a value of another type."""
    if hint in _READERS:
        return _READERS[hint](value, name)
    if get_origin(hint) is Literal:
        return _choice(get_args(hint), value, name)
    if get_origin(hint) is tuple:
        return _list(get_args(hint)[0], value, name)
    if get_origin(hint) in (Union, UnionType):
        return None if value is None else _value(_chosen(hint, value, name), value, name)
    return _dataclass(hint, value, name)


def _chosen(hint: Any, value: object, name: str) -> Any:
    """Returns the class, of those in a union type, whose `kind` a JSON object states; if the type has only
    one class beside None, returns it without a look at the object. name: the object's path, for messages.
    Raises ValueError for an object with another `kind` or none."""
    members = [member for member in get_args(hint) if member is not NoneType]
    if len(members) == 1:
        return members[0]
    kinds = {KINDS[member]: member for member in members}
    tag = value.get("kind") if isinstance(value, Mapping) else None
    return kinds[str(_choice(tuple(kinds), tag, f"{name}.kind"))]


def _list(hint: Any, value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: must be a list, found {show(value)}")
    return tuple(_value(hint, item, f"{name}[{index}]") for index, item in enumerate(value))


def _choice(choices: tuple[object, ...], value: object, name: str) -> object:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: must be {' or '.join(map(str, choices))}, found {show(value)}")
    return value


def _integer(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"{name}: must be an integer from 0 to {2**31 - 1}, found {show(value)}")
    return value


def _float(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None or repr(number) != value:
        raise ValueError(
            f"{name}: must be a number written as Python's repr in a string, found {show(value)}"
        )
    return number


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, found {show(value)}")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string, found {show(value)}")
    return value


_READERS: Mapping[object, Callable[[object, str], object]] = {
    bool: _flag,
    int: _integer,
    float: _float,
    str: _text,
}
