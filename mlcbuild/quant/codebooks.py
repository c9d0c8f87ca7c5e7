"""The types of GGUF tensors whose weights are entries of codebooks, which no stored format keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

CODEBOOKS = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
"""Names of the GGUF tensor types whose weights are entries of a codebook, 256 to 2048 vectors that no rule
generates. The package gguf holds these, and decodes the types."""
_KEEPING = "as-is-"
"""Beginning of the names of the schemes that as_is.py makes."""


def quantized_again(scheme: str, kinds: Iterable[Collection[str]]) -> str:
    """Returns a remark that names the types with codebooks whose values the quantization `as-is` does not
    keep but quantizes again; "" if there are none, or for any other scheme. scheme: name of the quantization
    scheme; kinds: for each parameter that is not stored in float32, which keeps the values of all types, the
    types, such as "IQ3_S", of the checkpoint's tensors that make it up.
    """
    again = sorted(CODEBOOKS.intersection(kind for types in kinds for kind in types))
    if not again or not scheme.startswith(_KEEPING):
        return ""
    return f"no format keeps the values of the type {', '.join(again)}, so they are quantized again"
