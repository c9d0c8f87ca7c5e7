"""Quantization schemes as values: their names, their JSON, and the tensors that they store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, cast

from mlcbuild.canon import Json
from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.models.config import Param

Layout = Literal["plain", "row", "x16"]


@dataclass(frozen=True)
class Scheme:
    """How the parameters of a model are stored and multiplied.

    bits 0 means no quantization: matrices are `dtype`, layout "plain". Otherwise matrices (every
    two-dimensional parameter) become two tensors, `<name minus .weight>.q_weight` and `.q_scale`.
    """

    name: str
    bits: Literal[0, 4, 5, 8]
    group_size: int
    """Consecutive weights of a row (input dimension) that share one scale; 0 when bits is 0."""
    dtype: Literal["float32", "float16"]
    """Storage of unquantized parameters, scales and the KV cache. Arithmetic on CPUs is float32."""
    layout: Layout
    activation_bits: Literal[0, 8] = 0
    """8: activations are quantized to int8 per group before each product; 0: they stay floating point."""
    overrides: tuple[tuple[str, Scheme], ...] = ()
    """(pattern, scheme): the first pattern that matches a parameter's name decides for it. A pattern is
    one or more shell globs joined by `|`, matched against the name with and without `.weight`.

    Any scheme without overrides may stand here, of any dtype, layout and number of bits: each parameter is
    stored wholly by its own scheme. What belongs to no parameter (the KV cache) follows the outer scheme.
    """


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("q0f32", 0, 0, "float32", "plain"),
        Scheme("q0f16", 0, 0, "float16", "plain"),
        Scheme("q4f32_1", 4, 32, "float32", "row"),
        Scheme("q4f16_1", 4, 32, "float16", "row"),
        Scheme("q8f32_1", 8, 32, "float32", "row"),
        Scheme("q8f16_1", 8, 32, "float16", "row"),
        Scheme("q4a8_1", 4, 32, "float16", "x16", activation_bits=8),
        Scheme("q5a8_1", 5, 32, "float16", "x16", activation_bits=8),
        Scheme("q8a8_1", 8, 32, "float16", "x16", activation_bits=8),
    )
}
"""The built-in schemes by name: q<bits><float dtype>_1 as in mlc-llm; `a8` means 8-bit activations."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as weights files hold it and the library takes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


_ITEM_BYTES = {"float32": 4, "float16": 2, "uint32": 4, "uint8": 1}


def _matches(pattern: str, name: str) -> bool:
    short = name.removesuffix(".weight")
    globs = [glob.strip() for glob in pattern.split("|")]
    return any(fnmatchcase(name, glob) or fnmatchcase(short, glob) for glob in globs)


def scheme_for(scheme: Scheme, name: str) -> Scheme:
    """The scheme that stores the parameter `name`: that of the first override that matches, or `scheme`."""
    for pattern, other in scheme.overrides:
        if _matches(pattern, name):
            return replace(other, overrides=())
    return scheme


def stored(param: Param, scheme: Scheme) -> tuple[StoredTensor, ...]:
    """The tensors that hold one parameter [N, K] under a scheme.

    row: q_weight uint32 [N, ceil(K/32) * 32*bits/32], q_scale dtype [N, ceil(K/32)].
    x16: q_weight uint8 [ceil(N/16), ceil(K/32), 64*bits], q_scale float16 [ceil(N/16), ceil(K/32), 16].
    """
    own = scheme_for(scheme, param.name)
    if own.bits == 0 or len(param.shape) != 2:
        return (StoredTensor(param.name, param.shape, own.dtype, "plain"),)
    rows, columns = param.shape
    groups = -(-columns // own.group_size)
    base = param.name.removesuffix(".weight")
    if own.layout == "row":
        words = groups * own.group_size * own.bits // 32
        return (
            StoredTensor(f"{base}.q_weight", (rows, words), "uint32", "row"),
            StoredTensor(f"{base}.q_scale", (rows, groups), own.dtype, "row"),
        )
    tiles = -(-rows // 16)
    return (
        StoredTensor(f"{base}.q_weight", (tiles, groups, 64 * own.bits), "uint8", "x16"),
        StoredTensor(f"{base}.q_scale", (tiles, groups, 16), "float16", "x16"),
    )


def stored_parameters(params: Sequence[Param], scheme: Scheme) -> tuple[StoredTensor, ...]:
    """What a library takes, in order: the tensors of every parameter, one after the other."""
    return tuple(tensor for param in params for tensor in stored(param, scheme))


def check_overrides(scheme: Scheme, params: Sequence[Param]) -> tuple[str, ...]:
    """One sentence for each override that decides for no parameter of a model; empty when all is well."""
    problems = []
    names = [param.name for param in params]
    left = set(names)
    for pattern, _ in scheme.overrides:
        matched = {name for name in names if _matches(pattern, name)}
        if not matched:
            hint = did_you_mean(
                pattern, {name.removesuffix(".weight") for name in names if "layers" not in name}
            )
            problems.append(
                f"scheme {scheme.name}: the override '{pattern}' matches no parameter of the model; {hint} "
                "(layers are named like layers.0.attn.qkv, layers.0.mlp.down)"
            )
        elif not matched & left:
            problems.append(
                f"scheme {scheme.name}: the override '{pattern}' has no effect, because earlier overrides "
                f"match all it matches ({', '.join(sorted(matched)[:3])}); move it before them or remove it"
            )
        left -= matched
    return tuple(problems)


def stored_bytes(params: Sequence[Param], scheme: Scheme) -> int:
    """Bytes of all tensors of a model as stored, without file headers."""
    return sum(tensor.size for tensor in stored_parameters(params, scheme))


def bits_per_weight(params: Sequence[Param], scheme: Scheme) -> float:
    """Stored bits over the number of parameters: scales, padding and unquantized vectors included."""
    return 8 * stored_bytes(params, scheme) / sum(math.prod(param.shape) for param in params)


def to_json(scheme: Scheme) -> dict[str, Json]:
    """Every field, so that a key changes with any of them. `name` enters too: it should be a built-in's."""
    return {
        "name": scheme.name,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "dtype": scheme.dtype,
        "layout": scheme.layout,
        "activation_bits": scheme.activation_bits,
        "overrides": [{"match": pattern, "scheme": to_json(other)} for pattern, other in scheme.overrides],
    }


_FORMATS = {
    (0, 0, "float32", "plain"),
    (0, 0, "float16", "plain"),
    *((bits, 32, dtype, "row") for bits in (4, 8) for dtype in ("float32", "float16")),
    *((bits, 32, "float16", "x16") for bits in (4, 5, 8)),
}
"""(bits, group_size, dtype, layout) that pack() can write."""


def from_json(value: Json) -> Scheme:
    """The inverse of to_json. Raises UsageError on anything that to_json would not write."""
    if not isinstance(value, dict):
        raise UsageError(f"a scheme must be a JSON object, found {value!r}")
    known = {"name", "bits", "group_size", "dtype", "layout", "activation_bits", "overrides"}
    if set(value) != known:
        wrong = ", ".join(sorted(set(value) ^ known))
        raise UsageError(f"a scheme has the fields {', '.join(sorted(known))}; missing or unknown: {wrong}")
    name, overrides = value["name"], value["overrides"]
    if not isinstance(name, str) or not isinstance(overrides, list):
        raise UsageError(
            f"a scheme's name must be a string and its overrides a list, found {name!r}, {overrides!r}"
        )
    form = (value["bits"], value["group_size"], value["dtype"], value["layout"])
    if form not in _FORMATS or value["activation_bits"] not in (0, 8):
        raise UsageError(
            f"scheme {name}: no format has (bits, group_size, dtype, layout) {form} "
            f"and activation_bits {value['activation_bits']}; known: {', '.join(SCHEMES)}"
        )
    return Scheme(
        name,
        cast("Literal[0, 4, 5, 8]", form[0]),
        form[1],
        cast("Literal['float32', 'float16']", form[2]),
        cast(Layout, form[3]),
        cast("Literal[0, 8]", value["activation_bits"]),
        tuple(_override(name, item) for item in overrides),
    )


def _override(scheme: str, item: Json) -> tuple[str, Scheme]:
    if not isinstance(item, dict) or set(item) != {"match", "scheme"} or not isinstance(item["match"], str):
        raise UsageError(f"scheme {scheme}: an override has the fields match and scheme, found {item!r}")
    other = from_json(item["scheme"])
    if other.overrides:
        raise UsageError(
            f"scheme {scheme}: the override '{item['match']}' has overrides of its own; flatten them"
        )
    return item["match"], other
