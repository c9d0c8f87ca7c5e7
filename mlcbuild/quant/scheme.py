"""Defines quantization schemes, and lists the tensors in which a scheme stores a model for one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias, cast

from mlcbuild.canon import Json
from mlcbuild.errors import UsageError, did_you_mean
from mlcbuild.models import Param
from mlcbuild.quant.format import Format, StoredTensor, load_format

BudgetKind: TypeAlias = Literal["target_bits", "max_size", "max_kl"]
"""The quantity that a budget for quantization limits: "target_bits" the bits of all stored tensors per weight
of the model, "max_size" their bytes, "max_kl" the mean KL divergence in nats. In a recipe, it is a key of a
quantization."""
PLAIN = "plain"
"""Name of the layout of parameters that are not matrices, such as norm weights: one unquantized array."""


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: the stored format of each parameter of a model, and the type of activations, on
    any device.
    """

    name: str
    format: str
    """Name of the stored format of matrices. All other parameters have the format's `dtype`, except those
    that a model family keeps in float32. The KV cache has it too, unless a recipe makes it int8. Whatever
    this type, floating point arithmetic on CPUs is float32."""
    activation_bits: Literal[0, 8] = 0
    """8: activations are quantized to int8, with a scale for each 32 consecutive values, before each product
    with a quantized matrix; 0: they stay floating point."""
    overrides: tuple[tuple[str, Scheme], ...] = ()
    """Pairs (pattern, scheme). The first pattern that matches a parameter's name decides the parameter's
    scheme; if none matches, it is the scheme that has these pairs. A pattern is one or more shell globs
    joined by `|`, matched against the name with and without `.weight`.

    The schemes in the pairs must not have overrides. The KV cache, which belongs to no parameter, follows the
    scheme that has these pairs.
    """
    budget: Budget | None = None
    """The budget of size or loss under which a build step chooses the format of each matrix; None for a
    scheme that needs no choice. With a budget, `format` is that of the largest candidate, an upper bound of
    the size."""
    choices: tuple[Scheme, ...] = ()
    """The schemes among which a build step chooses by the types of a checkpoint's tensors, for the scheme
    `as-is` (which keeps a quantized checkpoint's values) if a build is planned before the checkpoint is
    downloaded, so that these types are unknown; () in all other cases."""
    calibration: Path | tuple[str, ...] | None = None
    """The prompts in which a build step measures how much each column of a matrix counts when weights are
    rounded: the absolute path of a text file with one on each line, or the prompts themselves; None for no
    calibration."""

    @property
    def candidates(self) -> tuple[Scheme, ...]:
        """Returns the schemes among which a build step chooses, by a budget or by the types of a checkpoint's
        tensors; () for a scheme that needs no choice."""
        return self.choices if self.budget is None else self.budget.candidates


@dataclass(frozen=True)
class Budget:
    """A limit on the size or the quality loss of a quantized model, and the candidate schemes from which one
    is chosen for each matrix."""

    kind: BudgetKind
    limit: float
    """The value that the quantized model must not exceed: bits per weight, bytes of all stored tensors, or a
    mean KL divergence in nats, depending on `kind`."""
    candidates: tuple[Scheme, ...]
    """Schemes, from the smallest to the largest, of which one is chosen for each matrix of the model. None of
    them has overrides, that is other schemes for some parameters."""


@dataclass(frozen=True)
class Storage:
    """A quantization scheme together with the physical layout that a device's backend chose for its format,
    such as "row". The other fields are those of Scheme; budget and calibration are left out."""

    name: str
    format: str
    layout: str
    activation_bits: Literal[0, 8] = 0
    overrides: tuple[tuple[str, Storage], ...] = ()
    candidates: tuple[Storage, ...] = ()
    """The schemes, with their layouts, among which a build step chooses, by a budget or by the types of a
    checkpoint's tensors; () if the scheme needs no choice."""

    @property
    def definition(self) -> Format:
        """Returns the stored format (tensors, types of codes and scales) that this quantization scheme uses,
        in the physical layout which the device's backend has chosen. Raises UsageError if the format does not
        exist or does not have this layout."""
        return load_format(self.format, self.layout)

    @property
    def bits(self) -> int:
        return self.definition.bits

    @property
    def dtype(self) -> Literal["float32", "float16"]:
        return self.definition.dtype

    @property
    def formats(self) -> tuple[str, ...]:
        """Returns the sorted names of all stored formats that a quantization scheme uses: its own, those of
        its overrides (other schemes for some parameters), and those of the candidates among which a build
        step chooses."""
        others = [other.format for _, other in self.overrides]
        return tuple(sorted({self.format, *others, *(other.format for other in self.candidates)}))


def storage(scheme: Scheme, layout: Callable[[Scheme], str]) -> Storage:
    """Returns a quantization scheme with the physical layouts in which a device stores its formats. layout: a
    backend's function from a scheme to the name of its layout; it is also called for the schemes of
    overrides, and for those among which a build step chooses. Its exceptions pass through."""
    overrides = tuple((pattern, storage(other, layout)) for pattern, other in scheme.overrides)
    candidates = tuple(storage(other, layout) for other in scheme.candidates)
    return Storage(scheme.name, scheme.format, layout(scheme), scheme.activation_bits, overrides, candidates)


def matches(pattern: str, name: str) -> bool:
    """Returns True if a pattern, one or more shell globs joined by `|`, matches the parameter name `name`,
    with or without its suffix `.weight`. Case counts; spaces around a glob do not."""
    short = name.removesuffix(".weight")
    globs = [glob.strip() for glob in pattern.split("|")]
    return any(fnmatchcase(name, glob) or fnmatchcase(short, glob) for glob in globs)


def scheme_for(scheme: Storage, name: str) -> Storage:
    """Returns the scheme by which the parameter `name` is stored: that of the first override whose pattern
    matches the name, or else `scheme` itself.
    """
    for pattern, other in scheme.overrides:
        if matches(pattern, name):
            return replace(other, overrides=())
    return scheme


def stored(param: Param, scheme: Storage) -> tuple[StoredTensor, ...]:
    """Returns descriptions of the tensors in which one parameter is stored under a model's scheme, such as
    codes and scales, in the format's order; a parameter that is no matrix is one tensor. Raises UsageError if
    the parameter's format does not exist or lacks the scheme's layout."""
    storage = scheme_for(scheme, param.name)
    if param.matrix is None:
        return (StoredTensor(param.name, param.shape, plain_dtype(param, storage), PLAIN),)
    base = param.name.removesuffix(".weight")
    tensors = []
    for part in storage.definition.tensors:
        first, *rest = part.shape(*param.matrix)
        # Matrices of a stack follow each other along axis 0, each padded to whole indices of it.
        shape = (param.count * first, *rest)
        tensors.append(StoredTensor(f"{base}.{part.suffix}", shape, part.dtype, storage.layout))
    return tuple(tensors)


def plain_dtype(param: Param, storage: Storage) -> Literal["float32", "float16"]:
    """Returns the dtype of a parameter that is stored unquantized because it is not a matrix: float32 if the
    model demands it, otherwise the `dtype` of its scheme's format. storage: the scheme of this parameter.
    Raises UsageError if that format does not exist or lacks the scheme's layout."""
    return "float32" if param.stored == "float32" else storage.dtype


def rows_per_index(param: Param, scheme: Storage) -> int:
    """Returns the number of rows of a parameter that one index of axis 0 of its stored tensors covers: 1, or
    16 if the parameter is a matrix in tiles of 16 rows. Raises UsageError if the format does not exist or
    lacks the scheme's layout."""
    return 1 if param.matrix is None else scheme_for(scheme, param.name).definition.rows_per_index


def stored_parameters(params: Sequence[Param], scheme: Storage) -> tuple[StoredTensor, ...]:
    """Returns descriptions of all stored tensors of a model in the order in which a compiled library takes
    them: those of the first parameter, then those of the second, and so on. Raises UsageError if a format
    does not exist or lacks the scheme's layout."""
    return tuple(tensor for param in params for tensor in stored(param, scheme))


def stored_bytes(params: Sequence[Param], scheme: Storage) -> int:
    """Returns the total size in bytes of the tensors that store a model's parameters under a scheme, without
    file headers. Raises UsageError if a format does not exist or lacks the scheme's layout."""
    return sum(tensor.size for tensor in stored_parameters(params, scheme))


def check_overrides(scheme: Scheme | Storage, params: Sequence[Param]) -> tuple[str, ...]:
    """Returns an error message for each override of a scheme without effect: its pattern matches no parameter
    of the model, or only parameters that earlier overrides match. () if there is none."""
    problems = []
    names = [param.name for param in params]
    left = set(names)
    for pattern, _ in scheme.overrides:
        matched = {name for name in names if matches(pattern, name)}
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


def describe(scheme: Storage) -> dict[str, Json]:
    """Returns the JSON object that describes a scheme in library metadata and manifests: name, bits,
    group_size, dtype, layout, activation_bits and overrides, a list of {"match": pattern, "scheme": object of
    the same form}. It does not hold the name of the stored format. Raises UsageError if a format does not
    exist or lacks the scheme's layout."""
    form = scheme.definition
    return {
        "name": scheme.name,
        "bits": form.bits,
        "group_size": form.group_size,
        "dtype": form.dtype,
        "layout": scheme.layout,
        "activation_bits": scheme.activation_bits,
        "overrides": [{"match": pattern, "scheme": describe(other)} for pattern, other in scheme.overrides],
    }


def to_json(scheme: Storage) -> dict[str, Json]:
    """Returns a scheme as a JSON object for the parameters of a build step. It has every field, so that a
    change of any field changes the step's key, except the candidates: a step that chooses among them gets an
    object for each. An override is {"match": pattern, "scheme": object of the same form}."""
    return {
        "name": scheme.name,
        "format": scheme.format,
        "layout": scheme.layout,
        "activation_bits": scheme.activation_bits,
        "overrides": [{"match": pattern, "scheme": to_json(other)} for pattern, other in scheme.overrides],
    }


def from_json(value: Json) -> Storage:
    """Returns the scheme that a JSON object describes: the inverse of to_json, with () as candidates. Raises
    UsageError for missing or unknown fields, values of a wrong type, activation_bits other than 0 and 8, an
    override that has other fields than match and scheme or whose scheme has overrides, or a format or layout
    that does not exist."""
    if not isinstance(value, dict):
        raise UsageError(f"a scheme must be a JSON object, found {value!r}")
    fields = {"name", "format", "layout", "activation_bits", "overrides"}
    if set(value) != fields:
        wrong = ", ".join(sorted(set(value) ^ fields))
        raise UsageError(f"a scheme has the fields {', '.join(sorted(fields))}; missing or unknown: {wrong}")
    name, form, layout, overrides = value["name"], value["format"], value["layout"], value["overrides"]
    if not all(isinstance(text, str) for text in (name, form, layout)) or not isinstance(overrides, list):
        raise UsageError(
            "a scheme's name, format and layout must be strings and its overrides a list, found "
            f"{name!r}, {form!r}, {layout!r}, {overrides!r}"
        )
    bits = value["activation_bits"]
    if type(bits) is not int or bits not in (0, 8):  # False equals 0, and 8.0 equals 8
        raise UsageError(f"scheme {name}: activation_bits must be 0 or 8, found {bits!r}")
    load_format(cast(str, form), cast(str, layout))
    listed = tuple(_override(cast(str, name), item) for item in overrides)
    return Storage(cast(str, name), cast(str, form), cast(str, layout), cast("Literal[0, 8]", bits), listed)


def _override(scheme: str, item: Json) -> tuple[str, Storage]:
    if not isinstance(item, dict) or set(item) != {"match", "scheme"} or not isinstance(item["match"], str):
        raise UsageError(f"scheme {scheme}: an override has the fields match and scheme, found {item!r}")
    other = from_json(item["scheme"])
    if other.overrides:
        raise UsageError(
            f"scheme {scheme}: the override '{item['match']}' has overrides of its own; flatten them"
        )
    return item["match"], other
