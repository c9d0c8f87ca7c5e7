"""Tests of the CPU kernels that read the formats of quantized checkpoints, compared with float64 products of
the values that the package gguf reads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as reference
from numpy.typing import NDArray

from mlcbuild.checkpoints import gguf_blocks
from mlcbuild.compiler.cpu.isa import isa_for
from mlcbuild.compiler.cpu.kernels import embedding
from mlcbuild.compiler.cpu.kernels.embedding import Embedding
from mlcbuild.compiler.cpu.kernels.linear import Linear, kernel, linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.quant import Storage
from mlcbuild.quant.as_is import FORMATS, format_for
from mlcbuild.quant.codebooks import CODEBOOKS
from mlcbuild.quant.floats import Scratch
from tests import kernelbench
from tests.blocks import finite_rows, kind_of
from tests.kernelbench import TARGETS, Module
from tests.libharness import EVERY
from tests.schemes import normal

pytestmark = pytest.mark.xdist_group("kernels")

_LEFT_OUT = ("F16", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0", *CODEBOOKS)
"""Names of GGUF types without blocks, and of those that are stored in the format of another type."""
TYPES: dict[str, tuple[str, ...]] = {form: (name,) for name, form in FORMATS.items() if name not in _LEFT_OUT}
TYPES |= {"q8_1": ("Q4_1", "Q8_0"), "q8_k": ("Q4_K", "Q6_K")}
"""Stored format -> the GGUF types of the rows with which it is tested."""
ON: dict[str, tuple[str, ...]] = {
    "avx512vnni": tuple(TYPES),
    "avx2": ("q5_1", "q4_k", "q6_k", "iq4_nl"),
    "neon": ("q4_k", "q6_k", "iq4_xs"),
    "portable": ("q4_k", "q6_k", "mxfp4"),
}
"""Instruction set -> the formats that are tested on it. By default all are tested on one instruction set, and
on others those whose kernels differ most from each other: with minima, with two scales in a group of 32, and
with codes that stand for integers of a table."""
if EVERY:
    ON |= dict.fromkeys(("avx2", "neon", "portable"), ("q4_1", "q5_1", "q8_0", "q4_k", "q6_k"))
CASES = pytest.mark.parametrize(("isa", "form"), [(isa, form) for isa, forms in ON.items() for form in forms])
COLUMNS = 512
RAGGED = [
    ("avx512vnni", "q4l"),
    ("avx512", "q6l"),
    ("avxvnni", "q3l"),
    ("avx2", "q5l"),
    ("i8mm", "q3l"),
    ("neon", "q4l"),
    ("portable", "q3l"),
]
"""(Instruction set, format) of matrices whose last group is not whole."""
if EVERY:
    forms = ("q3l", "q4l", "q5l", "q6l")
    RAGGED = [(isa, form) for isa in TARGETS if isa != "avx512amx" for form in forms]
NARROW = 328
"""Number of columns of the quantized matrices. It is a multiple neither of a group of 32 nor of a block of
256."""


@cache
def matrix(form: str) -> tuple[tuple[NDArray[np.generic], ...], NDArray[np.float32]]:
    """Returns (stored tensors; values in float32) of a random matrix with 50 rows, quantized to blocks of 256
    weights or groups of 32 as GGUF files are. form: name of the format."""
    types = TYPES[form]
    assert format_for(types) == form
    parts = [(finite_rows(name, 50 // len(types), COLUMNS, i), kind_of(name)) for i, name in enumerate(types)]
    values = np.concatenate(
        [reference.dequantize(raw, GGMLQuantizationType(kind.number)) for raw, kind in parts]
    )
    definition = Storage(form, form, "x16", 8).definition
    assert definition.pack_blocks is not None
    arrays = definition.pack_blocks([gguf_blocks.unpack(*part) for part in parts], "matrix")
    shapes = [tensor.shape(*values.shape) for tensor in definition.tensors]
    return tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)), values


def product(isa: str, form: str, columns: int = COLUMNS) -> Linear:
    return linear(isa_for(TARGETS[isa]), Storage(form, form, "x16", 8), 50, columns)


def table(isa: str, form: str, columns: int = COLUMNS) -> Embedding:
    return embedding.embedding(isa_for(TARGETS[isa]), Storage(form, form, "x16", 8), 50, columns)


def module(isa: str) -> Module:
    return kernelbench.once(f"block kernels {isa}", lambda: _compiled(isa))


def _compiled(isa: str) -> Module:
    forms = ON.get(isa, ())
    functions = [kernel(product(isa, form), Fusion()) for form in forms]
    functions += [embedding.kernel(table(isa, form)) for form in forms]
    for form in (form for name, form in RAGGED if name == isa):
        functions += [
            kernel(product(isa, form, NARROW), Fusion()),
            embedding.kernel(table(isa, form, NARROW)),
        ]
    return kernelbench.compiled(TARGETS[isa], functions)


def rounded(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns activations as the kernels round them: to multiples of a 127th of the largest magnitude in each
    group of 32, in float64."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.float32(127) / np.where(largest == 0, np.float32(1), largest)
    steps = np.rint(groups * inverse) * (largest.astype(np.float64) / 127)
    rows: NDArray[np.float64] = steps.reshape(x.shape)
    return rows


@CASES
def test_a_product_uses_the_values_of_the_checkpoint(isa: str, form: str) -> None:
    """Checks products with matrices whose values come from GGUF blocks, for 1 to 65 rows of activations,
    against float64. The result of a row must have the same bits in any batch."""
    kernelbench.need(TARGETS[isa])
    stored, values = matrix(form)
    exact, created = values.astype(np.float64), kernel(product(isa, form), Fusion())
    x = kernelbench.rows(np.random.default_rng(1), 65, COLUMNS)
    alone = module(isa).run(created, (1, 50), x[:1], *stored)
    for m in (1, 3, 8, 9, 65):
        actual = module(isa).run(created, (m, 50), x[:m], *stored)
        observed = rounded(x[:m])
        bound = 3e-6 * (np.abs(observed) @ np.abs(exact.T))
        assert (np.abs(actual - observed @ exact.T) <= bound).all(), m
        assert (actual[:1] == alone).all(), m


@CASES
def test_a_table_has_the_values_of_the_checkpoint(isa: str, form: str) -> None:
    kernelbench.need(TARGETS[isa])
    stored, values = matrix(form)
    tokens = np.array([0, 49, 5, 5, 17, 16, 15], np.int32)
    actual = module(isa).run(embedding.kernel(table(isa, form)), (7, COLUMNS), tokens, *stored)
    np.testing.assert_allclose(actual, values[tokens], rtol=0, atol=1e-6 * np.abs(values).max())


@pytest.mark.parametrize(("isa", "form"), RAGGED)
def test_quantized_matrices_have_any_number_of_columns(isa: str, form: str) -> None:
    kernelbench.need(TARGETS[isa])
    definition = Storage(form, form, "x16", 8).definition
    stored = tuple(definition.pack(normal(50, NARROW), Scratch(), "matrix"))
    values = definition.unpack(stored, (50, NARROW))
    exact, created = values.astype(np.float64), kernel(product(isa, form, NARROW), Fusion())
    x = kernelbench.rows(np.random.default_rng(1), 65, NARROW)
    observed = rounded(np.pad(x, ((0, 0), (0, -NARROW % 32))))[:, :NARROW]
    for m in (1, 8, 65):
        actual = module(isa).run(created, (m, 50), x[:m], *stored)
        bound = 3e-6 * (np.abs(observed[:m]) @ np.abs(exact.T))
        assert (np.abs(actual - observed[:m] @ exact.T) <= bound).all(), m
    tokens = np.array([0, 49, 5, 17], np.int32)
    rows = module(isa).run(embedding.kernel(table(isa, form, NARROW)), (4, NARROW), tokens, *stored)
    np.testing.assert_allclose(rows, values[tokens], rtol=0, atol=1e-6 * np.abs(values).max())


def test_names_of_kernels_and_prompts_without_tile_registers() -> None:
    """Checks the names of the kernels for formats that keep a GGUF file's values, and that they have no
    variant with tile registers (AMX), which would round these values to bfloat16."""
    assert product("avx512vnni", "q4_k").name == "q4_ka8.avx512vnni"
    assert table("avx2", "q6_k").name == "embedding.q6_k.avx2"
    q4_product = linear(isa_for(TARGETS["avx512amx"]), Storage("q4_k", "q4_k", "x16", 8), 50, COLUMNS)
    assert q4_product.isa.amx and not q4_product.has_prompt_variant
