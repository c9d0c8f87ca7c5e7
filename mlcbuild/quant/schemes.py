"""Lists the quantization schemes that recipes may name. No function that runs as a build step imports this
table, so a new scheme causes no step to run again."""

from __future__ import annotations

from mlcbuild.quant.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("q0f32", "f32"),
        Scheme("q0f16", "f16"),
        Scheme("q4f32_1", "q4f32"),
        Scheme("q4f16_1", "q4f16"),
        Scheme("q8f32_1", "q8f32"),
        Scheme("q8f16_1", "q8f16"),
        Scheme("q4a8_1", "q4s", activation_bits=8),
        Scheme("q5a8_1", "q5s", activation_bits=8),
        Scheme("q8a8_1", "q8s", activation_bits=8),
        Scheme("q3a8_2", "q3l", activation_bits=8),
        Scheme("q4a8_2", "q4l", activation_bits=8),
        Scheme("q5a8_2", "q5l", activation_bits=8),
        Scheme("q6a8_2", "q6l", activation_bits=8),
    )
}
"""Scheme name -> quantization scheme. q0f32 and q0f16 do not quantize. The other names are q<bits><type of
scales>_<version>, as in mlc-llm, where `a8` in place of the type means float16 scales and 8-bit activations.
`_1` means one scale per 32 weights. `_2` means that a scale is the product of a float16 per 256 weights and
an integer per group; with 4 and 5 bits there are also minima. The scheme `as-is`, which keeps a quantized
checkpoint's values, is not listed here."""
