"""Rotary embeddings as checkpoints spell them, resolved to a Rope.

Two spellings exist. Until transformers 4: `rope_theta`, `rope_scaling` ({"type" or "rope_type", ...}) and
`partial_rotary_factor` beside the other fields. From transformers 5: one object `rope_parameters` that
holds all of it, or one such object per kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlcbuild.errors import did_you_mean
from mlcbuild.models import rotary
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.layers import Rope
from mlcbuild.models.rounding import f32

ROPE_FIELDS = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
DEFAULT_THETA = 10000.0
LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeRules:
    """What differs between families."""

    partial: bool = False
    """Whether partial_rotary_factor is honoured; where it is not, it must be 1."""
    types: tuple[str, ...] = ("default", "linear", "llama3", "longrope", "yarn")
    aliases: Mapping[str, str] | None = None
    original_max_position: int | None = None
    """Stands in for an absent original_max_position_embeddings; None: max_position_embeddings does."""


@dataclass(frozen=True)
class _Setting:
    """What one rope object is read against."""

    head_dim: int
    max_position: int
    theta: float | None
    partial: float | None
    original: int | None
    rules: RopeRules


@dataclass(frozen=True)
class _Base:
    """The part of every type: what is rotated, how fast, and the window the model was trained with."""

    dim: int
    theta: float
    max_position: int
    original: int


def read_rope(fields: Fields, head_dim: int, max_position: int, rules: RopeRules) -> Rope:
    """The Rope of a config.json, or a stand-in after reporting problems to `fields`."""
    setting = _Setting(
        head_dim,
        max_position,
        fields.number("rope_theta", low=1.0) if fields.has("rope_theta") else None,
        fields.number("partial_rotary_factor", high=1.0) if fields.has("partial_rotary_factor") else None,
        _original(fields),
        rules,
    )
    for name in ROPE_FIELDS:
        fields.get(name)
    resolved: dict[str, Rope] = {}
    for name, inner in _objects(fields).items():
        resolved[name] = _resolve(inner, setting)
        fields.adopt(inner)
    first, *others = resolved.items()
    for name, rope in others:
        if rope != first[1] and not fields.problems:
            fields.problem(name, f"differs from {first[0]}; one rotary embedding must serve all layers")
    return first[1]


def _original(fields: Fields) -> int | None:
    name = "original_max_position_embeddings"
    return fields.integer(name) if fields.has(name) else None


def _objects(fields: Fields) -> dict[str, Fields]:
    """Every rope object of the config by name; one empty object where there is none."""
    found: dict[str, Fields] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is None or value is ABSENT:
            continue
        if not isinstance(value, dict):
            fields.problem(name, f"must be an object or null, found {show(value)}")
        elif any(kind in value for kind in LAYER_KINDS):
            found |= _nested(fields, name, value)
        elif value:
            found[name] = fields.inner(name, value)
    return found or {"rope_theta": Fields(fields.place, {})}


def _nested(fields: Fields, name: str, value: Mapping[str, object]) -> dict[str, Fields]:
    found = {}
    for kind, inner in value.items():
        if kind not in LAYER_KINDS or not isinstance(inner, dict):
            kinds = ", ".join(LAYER_KINDS)
            fields.problem(f"{name}.{kind}", f"must be an object under one of {kinds}; found {show(inner)}")
        else:
            found[f"{name}.{kind}"] = fields.inner(f"{name}.{kind}", inner)
    return found


def _resolve(inner: Fields, setting: _Setting) -> Rope:
    kind = _type(inner, setting.rules)
    base = _base(inner, setting)
    if kind is None or base is None:
        return Rope(2, (1.0,))
    rope = _TYPES[kind](inner, base)
    inner.close(f"rope type '{kind}'")
    return rope


def _type(inner: Fields, rules: RopeRules) -> str | None:
    """None after a problem."""
    aliases = rules.aliases or {}
    named = {}
    for name in ("rope_type", "type"):
        value = inner.get(name)
        if value is None or value is ABSENT:
            continue
        if not isinstance(value, str):
            inner.problem(name, f"must be a string, found {show(value)}")
            continue
        named[name] = aliases.get(value, value)
    if len(set(named.values())) > 1:
        inner.problem("type", f"says {named['type']}, but rope_type says {named['rope_type']}; keep one")
    name, kind = next(iter(named.items()), ("rope_type", "default"))
    if kind in rules.types:
        return kind
    if kind == "dynamic":
        inner.problem(
            name,
            "dynamic scaling changes with the length of the running sequence, so keys already in the cache "
            "would be wrong; up to max_position_embeddings it equals no scaling: "
            "remove the scaling to build for that window",
        )
    else:
        inner.problem(name, f"'{kind}' is not supported; {did_you_mean(kind, rules.types)}")
    return None


def _base(inner: Fields, setting: _Setting) -> _Base | None:
    """None after a problem that leaves nothing to compute with."""
    theta = _agreed(inner, "rope_theta", setting.theta, 1e12)
    partial = _agreed(inner, "partial_rotary_factor", setting.partial, 1.0)
    share = 1.0 if partial is None else partial
    if share != 1.0 and not setting.rules.partial:
        inner.problem("partial_rotary_factor", f"this family rotates whole heads (1.0), found {share:g}")
        share = 1.0
    dim = int(setting.head_dim * share)
    if dim < 2 or dim % 2:
        rotated = f"{dim} of {setting.head_dim} dimensions of a head would be rotated"
        inner.problem("partial_rotary_factor", f"{rotated}; it must be an even number above 0")
        return None
    name = "original_max_position_embeddings"
    fallback = setting.original or setting.rules.original_max_position or setting.max_position
    original = inner.integer(name, default=fallback)
    if inner.sound(name) and setting.original not in (None, original):
        inner.problem(name, f"is {original}, but beside the other fields it is {setting.original}; keep one")
    return _Base(dim, theta or DEFAULT_THETA, setting.max_position, original)


def _agreed(inner: Fields, name: str, outer: float | None, high: float) -> float | None:
    """A number that may stand inside the rope object, beside the other fields, or both if equal."""
    low = 1.0 if name == "rope_theta" else 0.0
    if not inner.has(name):
        inner.get(name)
        return outer
    value = inner.number(name, low=low, high=high)
    if inner.sound(name) and outer is not None and outer != value:
        inner.problem(name, f"is {value:g}, but beside the other fields it is {outer:g}; keep one")
    return value


def _default(inner: Fields, base: _Base) -> Rope:
    return Rope(base.dim, rotary.default(base.theta, base.dim))


def _factor(inner: Fields) -> float:
    value = inner.number("factor", high=1e6)
    if inner.sound("factor") and value < 1:
        inner.problem("factor", f"must be at least 1, found {value:g}")
    return max(value, 1.0)


def _linear(inner: Fields, base: _Base) -> Rope:
    return Rope(base.dim, rotary.linear(rotary.default(base.theta, base.dim), _factor(inner)))


def _llama3(inner: Fields, base: _Base) -> Rope:
    low = inner.number("low_freq_factor", low=1e-6, high=1e6)
    high = inner.number("high_freq_factor", low=1e-6, high=1e6)
    if inner.sound("low_freq_factor", "high_freq_factor") and low >= high:
        inner.problem("high_freq_factor", f"must be above low_freq_factor {low:g}, found {high:g}")
    factor = _factor(inner)
    plain = rotary.default(base.theta, base.dim)
    if inner.problems:
        return Rope(base.dim, plain)
    return Rope(base.dim, rotary.llama3(plain, rotary.Llama3(factor, low, high, base.original)))


def _yarn(inner: Fields, base: _Base) -> Rope:
    factor = _factor(inner)
    mscale, mscale_all = (inner.maybe_number(name, None) for name in ("mscale", "mscale_all_dim"))
    attention = inner.number("attention_factor", rotary.yarn_attention(factor, mscale, mscale_all), high=1e6)
    scaling = rotary.Yarn(
        factor,
        base.original,
        inner.number("beta_fast", 32.0, low=1e-6, high=1e6),
        inner.number("beta_slow", 1.0, low=1e-6, high=1e6),
        inner.flag("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow and inner.sound("beta_fast", "beta_slow"):
        inner.problem("beta_fast", f"must not be below beta_slow {scaling.beta_slow:g}")
    return Rope(base.dim, rotary.yarn(base.theta, base.dim, scaling), f32(attention))


def _longrope(inner: Fields, base: _Base) -> Rope:
    short = inner.numbers("short_factor", base.dim // 2)
    long = inner.numbers("long_factor", base.dim // 2)
    factor = inner.number("factor", base.max_position / base.original, high=1e9)
    suggested = rotary.longrope_attention(factor, base.original)
    attention = f32(inner.number("attention_factor", suggested, high=1e6))
    return Rope(
        base.dim,
        rotary.longrope(base.theta, short),
        attention,
        rotary.longrope(base.theta, long),
        attention,
        base.original,
    )


_TYPES: Mapping[str, Callable[[Fields, _Base], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
