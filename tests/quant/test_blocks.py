"""Tests that formats which keep a checkpoint's quantized values are read like the package gguf reads them,
bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.checkpoints import gguf_blocks
from mlcbuild.checkpoints.gguf_types import TYPES
from mlcbuild.errors import CheckpointError
from mlcbuild.models import Param
from mlcbuild.quant import Scheme, scheme_for, storage
from mlcbuild.quant.as_is import AGAIN, AS_IS, FORMATS, LONGEST_PATTERN, format_for, resolved
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.format import load_format
from tests.blocks import finite_rows, kind_of
from tests.blocks import reference as expected

QUANTIZED = [name for name, form in FORMATS.items() if form not in ("f16", AGAIN)]
MIXED = [
    ("Q4_0", "Q5_0"),
    ("Q4_0", "Q8_0"),
    ("Q4_1", "Q8_0"),
    ("Q4_K", "Q6_K"),
    ("Q3_K", "Q6_K"),
    ("Q4_K", "Q5_K"),
    ("Q2_K", "Q3_K"),
    ("Q5_K", "IQ4_XS"),
]
"""Combinations of GGUF types that occur among the parts of one fused matrix in published files."""


def stored(types: tuple[str, ...], rows: int, layout: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns (the values that a format stores, the values that the package gguf reads) of a random matrix
    with 768 columns. It consists of `rows` rows of each GGUF type in `types`, one type below the other.
    layout: "row" or "x16"."""
    form = load_format(format_for(types), layout)
    assert form.pack_blocks is not None
    parts = [(finite_rows(name, rows, 768, seed), kind_of(name)) for seed, name in enumerate(types)]
    arrays = form.pack_blocks([gguf_blocks.unpack(*part) for part in parts], "matrix")
    matrix = np.concatenate([expected(*part) for part in parts])
    rows, columns = matrix.shape
    tensors = []
    for array, tensor in zip(arrays, form.tensors, strict=True):
        assert array.dtype == tensor.dtype and array.flags.c_contiguous
        tensors.append(array.reshape(tensor.shape(rows, columns)))
    return form.unpack(tensors, (rows, columns)), matrix


@pytest.mark.parametrize("types", [*((name,) for name in QUANTIZED), *MIXED], ids="+".join)
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("layout", ["x16", "row"])
def test_stored_values_have_the_bits_of_the_gguf_package(
    types: tuple[str, ...], rows: int, layout: str
) -> None:
    """Checks that stored values have the bits that the package gguf reads. The bytes of the blocks are
    random, and scales are ordinary, zero, negative or the smallest float16."""
    actual, matrix = stored(types, rows, layout)
    assert (actual.view(np.uint32) == matrix.view(np.uint32)).all()


@pytest.mark.parametrize(
    "name", [name for name in QUANTIZED if name != "NVFP4"]
)  # all its scales are numbers
def test_a_scale_that_is_no_number_is_refused(name: str) -> None:
    raw = finite_rows(name, 16, 256, 0)
    raw[:] = 0xFF
    form = load_format(FORMATS[name], "x16")
    assert form.pack_blocks is not None
    with pytest.raises(CheckpointError, match=r"^some\.weight: it holds infinite or NaN weights"):
        form.pack_blocks([gguf_blocks.unpack(raw, kind_of(name))], "some.weight")


def test_floats_are_refused_where_values_are_kept() -> None:
    form = load_format("q4_k", "x16")
    with pytest.raises(CheckpointError, match=r"^a: it is not quantized, .*; .* changed .*, so run again$"):
        form.pack(np.zeros((16, 256), np.float32), Scratch(), "a")


def test_plain_numbers_are_no_blocks() -> None:
    with pytest.raises(
        ValueError, match=r"^F16 has no integer codes with scales; read it with dequantize\(\)$"
    ):
        gguf_blocks.unpack(np.zeros((1, 2), np.uint8), TYPES[1])


def test_formats_of_several_types_hold_all_of_them() -> None:
    assert [format_for(types) for types in MIXED] == [
        "q5_0",
        "q8_0",
        "q8_1",
        "q8_k",
        "q6_k",
        "q5_k",
        "q8_k",
        "q8_k",
    ]
    assert format_for({"F16"}) == "f16"
    mixed = ({"F32", "Q8_0"}, {"F16", "Q8_0"}, {"E4M3", "Q8_0"}, {"E4M3", "E5M2"}, {"Q8_0", "Q6_K"})
    for types in ({"BF16"}, {"I8"}, {"F16", "BF16"}, *mixed):
        assert format_for(types) == "f32"


def resolve(types: dict[str, set[str]], scheme: Scheme = AS_IS) -> dict[str, str]:
    """Returns parameter name -> name of the format that `scheme` chooses for it. types: parameter name ->
    GGUF types of the tensors that make up the parameter. Parameters with "norm" in their names are vectors,
    all others matrices."""
    params = [Param(name, (64,) if "norm" in name else (64, 256)) for name in types]
    scheme = resolved(scheme, types, params)
    assert all(len(pattern) <= 2 * LONGEST_PATTERN for pattern, _ in scheme.overrides)
    with_layouts = storage(scheme, lambda item: "plain" if item.format in ("f32", "f16") else "x16")
    return {name: scheme_for(with_layouts, name).format for name in types}


def test_each_parameter_has_the_format_of_its_types() -> None:
    types: dict[str, set[str]] = {"embed.weight": {"Q6_K"}, "norm.weight": {"F32"}}
    for layer in range(90):
        types[f"layers.{layer}.attn_norm.weight"] = {"F32"}
        types[f"layers.{layer}.mlp.up.weight"] = {"Q4_K"}
        types[f"layers.{layer}.mlp.shared.up.weight"] = {"F16"}
        types[f"layers.{layer}.mlp.down.weight"] = {"Q6_K" if layer % 3 else "Q4_K"}
    formats = {"Q6_K": "q6_k", "Q4_K": "q4_k", "F16": "f16", "F32": "f32"}
    assert resolve(types) == {name: formats[min(tensor_types)] for name, tensor_types in types.items()}


def test_overrides_of_the_recipe_come_first() -> None:
    base = Scheme("mine", AS_IS.format, 8, (("embed", Scheme("q8a8_1", "q8s", 8)),))
    types = {"embed.weight": {"Q6_K"}, "norm.weight": {"F32"}, "layers.0.mlp.up.weight": {"Q4_0"}}
    assert resolve(types, base) == {
        "embed.weight": "q8s",
        "norm.weight": "f32",
        "layers.0.mlp.up.weight": "q4_0",
    }


def test_a_checkpoint_without_quantized_tensors_stays_in_floats() -> None:
    assert set(resolve({"embed.weight": {"F32"}, "norm.weight": {"F32"}}).values()) == {"f32"}
