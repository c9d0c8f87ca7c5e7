"""Chooses formats for the scheme `as-is`, which keeps the values of a quantized checkpoint: for each
parameter one that can store every value of the types in which the checkpoint stores it. Only values of types
with codebooks (GGUF's IQ1, IQ2 and IQ3) are quantized again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mlcbuild.canon import digest
from mlcbuild.models import Param
from mlcbuild.quant.codebooks import CODEBOOKS
from mlcbuild.quant.format import load_format
from mlcbuild.quant.scheme import Scheme, matches

NAME = "as-is"
AS_IS = Scheme(NAME, NAME, activation_bits=8)
"""The scheme `as-is` that a recipe may name, which keeps the values of a quantized checkpoint. Its format is
a placeholder: `resolved` replaces it once the types of the checkpoint's tensors are known."""

AGAIN = "q4l"
"""The format in which `as-is` stores types whose weights are entries of a codebook. It quantizes them again:
the exact values would take 8 bits. Their entries are nearly evenly spaced, so 4 bits lose little."""
FORMATS: Mapping[str, str] = {
    "Q4_0": "q4_0",
    "TQ1_0": "q4_0",
    "TQ2_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "IQ4_NL": "iq4_nl",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "Q3_K": "q3_k",
    "Q4_K": "q4_k",
    "Q2_K": "q2_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_XS": "iq4_xs",
    "Q1_0": "q4_0",
    "Q2_0": "q4_0",
    "F16": "f16",
    **dict.fromkeys(sorted(CODEBOOKS), AGAIN),
}
"""Type of a GGUF tensor -> name of the smallest format that can store its values, or AGAIN; tensors of other
types are stored in float32.
"""
_QUANTIZING: Mapping[int, str] = {4: AGAIN, 5: "q5l", 6: "q6l", 8: "q8s"}
"""Number of bits of a code -> the format that quantizes weights to so many bits."""
_NOT_IN_GGUF: Mapping[str, str] = {"Q6_1": "q8_1", "E4M3": "e4m3", "E5M2": "e5m2"}
"""Type of a tensor in checkpoints other than GGUF (GPTQ, AWQ, MLX, compressed-tensors), named in GGUF's style
-> name of the smallest stored format that can hold its values. Q6_1 has 6 bits, a scale and a minimum; E4M3
and E5M2 are 8-bit floats with a float32 scale for each group."""
_MIXED = tuple(
    name for name in (*dict.fromkeys(FORMATS.values()), "q8_1", "q8_k") if name not in ("f16", AGAIN)
)
_EXACT = "f32"
_FLOATS = {"f16", _EXACT, "e4m3", "e5m2"}
"""Names of the formats that store floats: products read activations as float32, and a matrix whose parts need
one of these formats and another is stored in float32."""
UNQUANTIZED = (
    "'as-is' keeps the values of quantized tensors, and this checkpoint has none; choose a scheme such as "
    "q4a8_1, or q0f16 for no quantization"
)
"""The error message if `as-is` is chosen for a checkpoint whose tensors are not quantized."""
_LAYER = re.compile(r"^layers\.\d+\.")
LONGEST_PATTERN = 400
"""Maximum length in characters of the pattern of one override, because a bundle's manifest limits the length
of its texts. Longer patterns are divided into several overrides."""


def format_for(types: Collection[str]) -> str:
    """Returns the name of the smallest stored format, such as "q4_0" or "f32", that can store the values of
    every type in `types`: the types, such as "Q4_K", of the checkpoint's tensors (at least one) that make up
    one matrix. The smallest has the fewest bits per weight. If a type has a codebook and none is a type of
    floats, the result is a format that quantizes the matrix again, with the bits of the widest codes."""
    formats = {FORMATS.get(name) or _NOT_IN_GGUF.get(name, _EXACT) for name in types}
    if len(formats) == 1:
        return formats.pop()
    if formats & _FLOATS:
        return _EXACT
    if AGAIN in formats:
        return _QUANTIZING[max(load_format(name, "x16").bits for name in formats)]
    blocks = [load_format(name, "x16").blocks for name in formats]
    holding = []
    for name in _MIXED:
        form = load_format(name, "x16")
        if form.blocks and all(other and form.blocks.holds(other) for other in blocks):
            holding.append((form.bits_per_weight, name))
    return min(holding)[1] if holding else _EXACT


def is_as_is(scheme: Scheme) -> bool:
    """Returns True if a scheme is `as-is` with its placeholder format, which must be replaced by formats that
    suit the checkpoint before use."""
    return scheme.format == NAME


def undecided(scheme: Scheme) -> Scheme:
    """Returns the scheme `as-is` for a checkpoint on a hub. Its `choices` are all formats that can store
    quantized tensors, among which a build step chooses by the types of the checkpoint's tensors. The
    overrides of `scheme` stay, and decide first."""
    names = sorted({*FORMATS.values(), *_NOT_IN_GGUF.values(), *_MIXED, *_QUANTIZING.values(), _EXACT})
    choices = {
        other.name: other for other in (*map(_scheme, names), *(other for _, other in scheme.overrides))
    }
    return replace(_scheme(_EXACT), name=NAME, choices=tuple(choices.values()), overrides=scheme.overrides)


def resolved(scheme: Scheme, types: Mapping[str, Collection[str]], params: Sequence[Param]) -> Scheme:
    """Returns a scheme that stores each matrix in the smallest format that holds its values in the checkpoint
    exactly (types with codebooks are quantized again instead), and other parameters in float32. The overrides
    of `scheme` stay, and decide first. Its name is "as-is-" and 8 digits of a digest of formats and patterns.

    types: parameter name -> types, in GGUF's names, of the tensors that make up the parameter in the
    checkpoint. params: all parameters of the model.
    """
    by_format: dict[str, list[str]] = {}
    for param in params:
        if any(matches(pattern, param.name) for pattern, _ in scheme.overrides):
            continue
        format_name = format_for(types[param.name]) if param.matrix is not None else _EXACT
        by_format.setdefault(format_name, []).append(param.name)
    by_size = sorted(by_format.items(), key=lambda item: (-len(item[1]), item[0]))
    main = next((name for name, _ in by_size if name != _EXACT), _EXACT)
    others = [param.name for param in params]
    overrides = list(scheme.overrides)
    for name, names in by_size:
        if name != main:
            overrides += [(pattern, _scheme(name)) for pattern in name_patterns(names, others)]
    content = [main, [[pattern, other.name] for pattern, other in overrides]]
    label = f"{NAME}-{digest('scheme/1', content)[:8]}"
    return replace(_scheme(main), name=label, overrides=tuple(overrides))


def name_patterns(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Returns patterns (globs joined by "|", without the suffix `.weight`, at most 400 characters each) that
    together match all of `names` and no other name in `every`, the names of all parameters. A parameter that
    occurs in each layer is matched by one glob for all layers if `names` has it for all. Returns [""] if
    `names` is empty."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_LAYER.sub("layers.*.", name), []).append(name)
    globs: list[str] = []
    for kind, globs_of_kind in kinds.items():
        matching = {name for name in every if matches(kind, name)}
        globs += [kind] if matching <= set(names) else globs_of_kind
    patterns = [""]
    for glob in (name.removesuffix(".weight") for name in globs):
        if patterns[-1] and len(patterns[-1]) + len(glob) >= LONGEST_PATTERN:
            patterns.append("")
        patterns[-1] += f"|{glob}" if patterns[-1] else glob
    return patterns


def _scheme(name: str) -> Scheme:
    """Returns the scheme that stores all matrices in the format `name`, with 8-bit activations if that format
    quantizes weights."""
    return Scheme(name, name, 0 if name in _FLOATS else 8)
