"""Yields variations of a config.json in which a single field has another value: each field that the model
type has, except for those in FIXED, and each of its rotary embedding's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Config = dict[str, Any]
FIXED = {"model_type", "dtype", "torch_dtype", "architectures", "text_config", "vision_config", "vocab_size"}
"""Names of config.json fields to which `of`, which yields copies of a config with one field changed, gives no
other value: they determine the kind of model, its vocabulary, or the type of its numbers, or hold a nested
config. The fields inside text_config are varied instead of it."""
STRINGS = ("gelu", "relu", "silu", "default", "linear", "sigmoid", "softmax", "greedy", "other")
UNSET = (True, 0.5, 2, 7)
"""Values that are tried, one after the other, for a config.json field that is null or absent."""


def of(config: Config, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Config]]:
    """Yields (label, config) for each variation of a model's config.json in which a single field has another
    value. The fields in FIXED, such as model_type and vocab_size, keep theirs. defaults: name of a field ->
    the model type's default, for fields that the config lacks.
    """
    inside = ("text_config",) if "text_config" in config else ()
    own = config["text_config"] if inside else config
    standard = defaults["text_config"] if inside else defaults
    for name in sorted({*own, *standard} - FIXED):
        value = own.get(name, standard.get(name))
        for changed in _values(value, absent=name not in own):
            yield _label((*inside, name), changed), _with(config, (*inside, name), changed)
    for rope in ("rope_parameters", "rope_scaling"):
        yield from _rope(config, (*inside, rope), own.get(rope))
    if inside:
        for name in sorted({*config, *defaults} - FIXED):
            value = config.get(name, defaults.get(name))
            for changed in _values(value, absent=name not in config):
                yield _label((name,), changed), _with(config, (name,), changed)


def _rope(config: Config, path: tuple[str, ...], rope: Any) -> Iterator[tuple[str, Config]]:
    if not isinstance(rope, dict):
        return
    for name, value in rope.items():
        if isinstance(value, dict):
            yield from _rope(config, (*path, name), value)
            continue
        for changed in _values(value, absent=False):
            yield _label((*path, name), changed), _with(config, (*path, name), changed)


def _values(value: Any, absent: bool) -> Iterator[Any]:
    """Yields values that are tried in place of a field's value in a config.json: some of the same type, such
    as twice an integer or a reversed list, and null; for null, some fixed values. absent: True if the field
    is not in the config, so that `value` is its default; null is then left out.
    """
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2, max(value // 2, 0), 1)
    elif isinstance(value, float):
        yield from (value * 1.5, value * 0.5, 1.0)
    elif isinstance(value, str):
        yield from (text for text in STRINGS if text != value)
    elif value is None:
        yield from UNSET
    elif isinstance(value, list) and value:
        yield value[::-1]
        yield [value[0]] * len(value)
        yield value[:-1]
    if value is not None and not absent:
        yield None


def _label(path: tuple[str, ...], value: Any) -> str:
    return f"{'.'.join(path)}={value!r}"


def _with(config: Config, path: tuple[str, ...], value: Any) -> Config:
    changed = deepcopy(config)
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed
