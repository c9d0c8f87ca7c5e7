"""Quantization schemes and, in NumPy, the definition of every stored format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from mlcbuild.models.config import Param

Layout = Literal["plain", "row", "x16"]


@dataclass(frozen=True)
class Scheme:
    """How the parameters of a model are stored and multiplied.

    bits 0 means no quantization: matrices are `dtype`, layout "plain". Otherwise matrices (every
    two-dimensional parameter) become two tensors, `<name minus .weight>.q_weight` and `.q_scale`.
    """

    name: str
    bits: Literal[0, 4, 8]
    group_size: int
    """Consecutive weights of a row (input dimension) that share one scale; 0 when bits is 0."""
    dtype: Literal["float32", "float16"]
    """Storage of unquantized parameters, scales and the KV cache. Arithmetic on CPUs is float32."""
    layout: Layout
    activation_bits: Literal[0, 8] = 0
    """8: activations are quantized to int8 per group before each product; 0: they stay floating point."""
    overrides: tuple[tuple[str, Scheme], ...] = ()
    """(pattern, scheme): the first pattern that matches a parameter's name decides for it. A pattern is
    one or more shell globs joined by `|`, matched against the name with and without `.weight`."""


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


def scheme_for(scheme: Scheme, name: str) -> Scheme:
    """The scheme that stores the parameter `name`: that of the first override that matches, or `scheme`."""
    short = name.removesuffix(".weight")
    for pattern, other in scheme.overrides:
        if any(fnmatchcase(name, glob) or fnmatchcase(short, glob) for glob in pattern.split("|")):
            return replace(other, overrides=())
    return scheme


def stored(param: Param, scheme: Scheme) -> tuple[StoredTensor, ...]:
    """The tensors that hold one parameter [N, K] under a scheme.

    row: q_weight uint32 [N, ceil(K/32) * 32*bits/32], q_scale dtype [N, ceil(K/32)].
    x16 (4 bits): q_weight uint8 [ceil(N/16), ceil(K/32), 256], q_scale float16 [ceil(N/16), ceil(K/32), 16].
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
