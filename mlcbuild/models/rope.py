"""Reads rotary embeddings as a checkpoint's config.json describes them, and returns them as `Rope` objects.

Two notations exist. Until transformers 4: `rope_theta`, `rope_scaling` ({"type" or "rope_type", ...}) and
`partial_rotary_factor` beside the other fields. From transformers 5: one object `rope_parameters` with all of
these, or one such object for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mlcbuild.errors import did_you_mean
from mlcbuild.models import rotary
from mlcbuild.models.fields import ABSENT, Fields, show
from mlcbuild.models.layers import QueryScale, Rope
from mlcbuild.models.rounding import f32

ROPE_FIELDS = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
LAYER_KINDS = ("full_attention", "sliding_attention")
Extension: TypeAlias = Literal["alpha", "mscale", "beta"]
"""Optional features of the rope object in config.json, each of one model family: `alpha`, with which
`dynamic` scaling increases rope_theta by a fixed factor, whatever the length (Hunyuan); `mscale`:
short_mscale and long_mscale, LongRoPE's attention factors (Phi); `beta`: llama_4_scaling_beta, which scales
queries by their position (Ministral)."""


@dataclass(frozen=True)
class RopeRules:
    """The rules of one model family for reading rotary embeddings from config.json."""

    partial: float | None = None
    """Value of partial_rotary_factor that is used if config.json does not state this field. None: there is no
    such value; if config.json states the field, it must be 1."""
    rotary_dim: bool = False
    """True if the field rotary_dim gives the number of rotated dimensions of a head."""
    interleaved: bool = False
    """True if checkpoints of a model family rotate the dimensions 2i and 2i + 1 as a pair; this project's
    programs pair i and i + dim / 2."""
    theta: float = 10000.0
    """The value of rope_theta if config.json does not state it."""
    by_kind: bool = False
    """True if layers with an attention window have a rotary embedding of their own, without frequency scaling
    unless config.json states it for sliding_attention."""
    local_theta: float | None = None
    """The value of rope_theta for layers with an attention window if config.json lacks rope_local_base_freq;
    None: that of the other layers."""
    extensions: tuple[Extension, ...] = ()
    """The optional features of config.json's rope object that the checkpoints of a model family may use: any
    of those that `Extension` describes, "alpha" (a larger theta), "mscale" (LongRoPE's attention factors) and
    "beta" (a scale of queries by position). The fields of features that are not listed are refused."""
    ignored: tuple[str, ...] = ()
    """Names of fields in the rope object of config.json (rope_scaling or rope_parameters) that do not change
    results for text."""
    types: tuple[str, ...] = ("default", "linear", "llama3", "longrope", "yarn")
    aliases: Mapping[str, str] | None = None
    original_max_position: int | None = None
    """Number of tokens that replaces the field original_max_position_embeddings of config.json if it is
    absent; None: the value of max_position_embeddings replaces it."""


@dataclass(frozen=True)
class _Setting:
    """The fields of config.json outside its rope object (rope_scaling or rope_parameters) that have an effect
    on rotary embeddings."""

    head_dim: int
    max_position: int
    theta: float | None
    partial: float | None
    original: int | None
    rules: RopeRules
    rotary_dim: int | None = None


@dataclass(frozen=True)
class _Base:
    """The values that every type of rotary embedding has: the number of rotated dimensions, theta, and the
    contexts of the model and of its training in tokens."""

    dim: int
    theta: float
    max_position: int
    original: int


def read_ropes(fields: Fields, head_dim: int, max_position: int, rules: RopeRules) -> dict[str, Rope]:
    """Reads the rotary embeddings that config.json describes, and returns "full_attention" and
    "sliding_attention" (the kind of a layer) -> the rotary embedding of such layers. The two may differ only
    if `rules.by_kind`.

    fields: the fields of config.json. For each wrong field a problem is added to it, and a valid rotary
    embedding replaces the wrong one. head_dim: dimensions of an attention head. max_position: the model's
    context in tokens. rules: those of the model family.
    """
    setting = _Setting(
        head_dim,
        max_position,
        fields.number("rope_theta", low=1.0) if fields.has("rope_theta") else None,
        fields.number("partial_rotary_factor", high=1.0) if fields.has("partial_rotary_factor") else None,
        _original(fields),
        rules,
        fields.integer("rotary_dim", high=head_dim)
        if rules.rotary_dim and fields.has("rotary_dim")
        else None,
    )
    full, sliding = LAYER_KINDS
    local = _local(fields, setting)
    for name in ROPE_FIELDS + (("rotary_dim",) if rules.rotary_dim else ()):
        fields.get(name)
    resolved: dict[str, dict[str, Rope]] = {full: {}, sliding: {}}
    for name, inner in _objects(fields).items():
        kind = sliding if rules.by_kind and name.endswith(sliding) else full
        resolved[kind][name] = _resolve(inner, local if kind == sliding else setting)
        fields.adopt(inner)
    if not resolved[full]:
        resolved[full]["rope_theta"] = _resolve(Fields(fields.place, {}), setting)
    for parameters in resolved.values():
        _agree(fields, parameters)
    first = next(iter(resolved[full].values()))
    if not rules.by_kind:
        return {full: first, sliding: first}
    second = next(iter(resolved[sliding].values()), None)
    return {full: first, sliding: second or _resolve(Fields(fields.place, {}), local)}


def _agree(fields: Fields, ropes: Mapping[str, Rope]) -> None:
    """Records a problem for the first field of config.json that describes another rotary embedding than the
    fields before it, since the layers must share one; none if `fields` already has problems. ropes: name of a
    field, such as "rope_scaling" -> the rotary embedding that it describes."""
    if not ropes:
        return
    first, *others = ropes.items()
    for name, rope in others:
        if rope != first[1] and not fields.problems:
            fields.problem(name, f"differs from {first[0]}; one rotary embedding must serve all layers")


def _local(fields: Fields, setting: _Setting) -> _Setting:
    """Returns `setting`, the fields of config.json outside its rope object, as they apply to layers with an
    attention window. If the model family has a rotary embedding of its own for these layers, with another
    default of theta (`local_theta`), rope_theta is replaced by rope_local_base_freq or, if config.json lacks
    it, by this default; otherwise `setting` is returned unchanged."""
    name = "rope_local_base_freq"
    default = setting.rules.local_theta
    if not setting.rules.by_kind:
        return setting
    if default is None:
        return setting
    theta = fields.number(name, low=1.0) if fields.has(name) else None
    fields.get(name)
    return replace(setting, theta=theta, rules=replace(setting.rules, theta=default))


def _original(fields: Fields) -> int | None:
    name = "original_max_position_embeddings"
    return fields.integer(name) if fields.has(name) else None


def _objects(fields: Fields) -> dict[str, Fields]:
    """Returns name of a field of config.json, "rope_scaling" or "rope_parameters" -> reader (a `Fields`) of
    the rope object in it. An object for one kind of layer has a key of its own, such as
    "rope_parameters.full_attention". If there is no rope object, returns "rope_theta" -> a reader of an empty
    object. For a field with anything but an object or null, a problem is added to `fields`."""
    objects: dict[str, Fields] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is None or value is ABSENT:
            continue
        if not isinstance(value, dict):
            fields.problem(name, f"must be an object or null, found {show(value)}")
        elif any(kind in value for kind in LAYER_KINDS):
            objects |= _nested(fields, name, value)
        elif value:
            objects[name] = fields.inner(name, value)
    return objects or {"rope_theta": Fields(fields.place, {})}


def _nested(fields: Fields, name: str, value: Mapping[str, object]) -> dict[str, Fields]:
    objects = {}
    for kind, inner in value.items():
        if kind not in LAYER_KINDS or not isinstance(inner, dict):
            kinds = ", ".join(LAYER_KINDS)
            fields.problem(f"{name}.{kind}", f"must be an object under one of {kinds}; found {show(inner)}")
        else:
            objects[f"{name}.{kind}"] = fields.inner(f"{name}.{kind}", inner)
    return objects


def _resolve(inner: Fields, setting: _Setting) -> Rope:
    kind = _type(inner, setting.rules)
    base = _base(inner, setting)
    if kind is None or base is None:
        return Rope(2, (1.0,))
    inner.ignore(setting.rules.ignored)
    rope = _TYPES[kind](inner, base)
    if "mscale" in setting.rules.extensions and kind == "longrope":
        short, long = (f32(inner.number(name)) for name in ("short_mscale", "long_mscale"))
        rope = replace(rope, attention_factor=short, long_factor=long)
    has_beta = "beta" in setting.rules.extensions
    if has_beta and (beta := inner.maybe_number("llama_4_scaling_beta", None)):
        rope = replace(rope, query_scale=QueryScale(beta, base.original))
    inner.close(f"rope type '{kind}'")
    return rope


def _type(inner: Fields, rules: RopeRules) -> str | None:
    """Returns the type of frequency scaling that the rope object of config.json (`inner`) names, such as
    "llama3"; "default", no scaling, if it names none. None if the type is not supported, with a problem
    recorded. "dynamic" is "alpha" if the object has this field and the model family uses it."""
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
    if kind == "dynamic" and "alpha" in rules.extensions and inner.has("alpha"):
        return "alpha"
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
    """Returns the values that every type of rotary embedding has: rotated dimensions, theta, and the contexts
    of the model and of its training in tokens. inner: the rope object of config.json, which collects a
    problem for each wrong field. Returns None if the number of rotated dimensions is odd or below 2."""
    theta = _agreed(inner, "rope_theta", setting.theta, 1e12)
    partial = _agreed(inner, "partial_rotary_factor", setting.partial, 1.0)
    share = (setting.rules.partial or 1.0) if partial is None else partial
    if share != 1.0 and setting.rules.partial is None:
        inner.problem("partial_rotary_factor", f"this family rotates whole heads (1.0), found {share:g}")
        share = 1.0
    dim = setting.rotary_dim or int(setting.head_dim * share)
    if dim < 2 or dim % 2:
        rotated = f"{dim} of {setting.head_dim} dimensions of a head would be rotated"
        inner.problem("partial_rotary_factor", f"{rotated}; it must be an even number above 0")
        return None
    name = "original_max_position_embeddings"
    fallback = setting.original or setting.rules.original_max_position or setting.max_position
    original = inner.integer(name, default=fallback)
    if inner.sound(name) and setting.original not in (None, original):
        inner.problem(name, f"is {original}, but beside the other fields it is {setting.original}; keep one")
    return _Base(dim, theta or setting.rules.theta, setting.max_position, original)


def _agreed(inner: Fields, name: str, outer: float | None, high: float) -> float | None:
    """Returns the number that a field of config.json states: in the rope object (`inner`), beside it
    (`outer`, its value there or None), or in both; None if in neither. If the two differ, a problem is added
    to `inner`, and the value in the rope object is returned. high: maximum of a valid number; a wrong one in
    the rope object adds a problem, and `high` is returned."""
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


def _alpha(inner: Fields, base: _Base) -> Rope:
    """Returns a rotary embedding whose theta is increased to theta * alpha^(dim / (dim - 2)). alpha: a field
    of the rope object in Hunyuan's config.json."""
    alpha = inner.number("alpha", low=1e-6, high=1e9)
    inner.ignore(("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    theta = base.theta * alpha ** (base.dim / max(base.dim - 2, 1))
    return Rope(base.dim, rotary.default(theta, base.dim))


def _linear(inner: Fields, base: _Base) -> Rope:
    return Rope(base.dim, rotary.linear(rotary.default(base.theta, base.dim), _factor(inner)))


def _llama3(inner: Fields, base: _Base) -> Rope:
    low = inner.number("low_freq_factor", low=1e-6, high=1e6)
    high = inner.number("high_freq_factor", low=1e-6, high=1e6)
    if inner.sound("low_freq_factor", "high_freq_factor") and low >= high:
        inner.problem("high_freq_factor", f"must be above low_freq_factor {low:g}, found {high:g}")
    factor = _factor(inner)
    default = rotary.default(base.theta, base.dim)
    if inner.problems:
        return Rope(base.dim, default)
    return Rope(base.dim, rotary.llama3(default, rotary.Llama3(factor, low, high, base.original)))


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
    "alpha": _alpha,
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
