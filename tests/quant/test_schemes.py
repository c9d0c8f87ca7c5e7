"""Tests of the table of built-in schemes."""

from __future__ import annotations

from mlcbuild.quant import as_is
from mlcbuild.quant.format import format_names
from mlcbuild.quant.schemes import SCHEMES as BUILT_IN
from tests.schemes import SCHEMES


def test_names_say_what_a_scheme_is() -> None:
    """Checks the names of quantization schemes, such as q4f16_1: q, bits of a weight, then `f16` or `f32` for
    the type of float activations or `a8` for activations of 8 bits. The ending is `_1` for one scale per
    group, as in mlc-llm, `_2` for scales in two levels, and empty for unquantized weights."""
    for name, scheme in SCHEMES.items():
        kind = "a8" if scheme.activation_bits else {"float16": "f16", "float32": "f32"}[scheme.dtype]
        variant = "" if not scheme.bits else "_1" if scheme.definition.blocks is None else "_2"
        assert name == f"q{scheme.bits}{kind}{variant}"
        assert BUILT_IN[name].name == name and not scheme.overrides


def test_every_format_has_a_scheme() -> None:
    """Checks that every format is used by a built-in scheme, or by the scheme that keeps a checkpoint's
    values."""
    kept = {*as_is.FORMATS.values(), "q8_1", "q8_k", "e4m3", "e5m2"}
    assert {scheme.format for scheme in BUILT_IN.values()} | kept == set(format_names())
