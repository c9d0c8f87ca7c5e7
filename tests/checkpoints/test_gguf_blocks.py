"""Tests of the dequantization of GGUF blocks, compared bit for bit with the package gguf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from mlcbuild.checkpoints import gguf_blocks
from mlcbuild.checkpoints.gguf_blocks import dequantize
from mlcbuild.checkpoints.gguf_types import TYPES, UNREADABLE, BlockType
from mlcbuild.quant.codebooks import CODEBOOKS
from tests.blocks import HALVES
from tests.blocks import reference as expected

INTEGERS_AND_DOUBLES: Mapping[str, DTypeLike] = {
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F64": np.float64,
}
"""GGUF type of plain numbers that the package gguf does not convert -> NumPy dtype of its numbers."""
KINDS = [kind for kind in TYPES.values() if kind.name not in INTEGERS_AND_DOUBLES]
QUANTIZED = [kind for kind in KINDS if kind.weights > 1]
QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
"""Names of the GGUF types to which the package gguf can quantize."""

_POSITIVE = np.array([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF], np.uint16)
SPECIAL_HALVES = np.concatenate([_POSITIVE, _POSITIVE | 0x8000])
"""Bits of float16 values: zero, subnormals, smallest normal, one, largest, infinity and NaN; then the same
ones with the sign bit set."""


def each(kinds: list[BlockType]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def dequantized(raw: NDArray[np.uint8], kind: BlockType) -> NDArray[np.float32]:
    out = np.full((raw.shape[0], raw.shape[1] // kind.size * kind.weights), 7.0, np.float32)
    dequantize(raw, kind, out)
    return out


def assert_same_bits(actual: NDArray[np.float32], other: NDArray[np.float32]) -> None:
    """Asserts that two arrays have the same bits, so that the signs of zeros are compared, too; any two NaN
    are equal."""
    assert actual.shape == other.shape
    both_nan = np.isnan(actual) & np.isnan(other)
    different = (actual.view(np.uint32) != other.view(np.uint32)) & ~both_nan
    assert not different.any(), (np.argwhere(different)[:5], actual[different][:5], other[different][:5])


def random_rows(kind: BlockType, rows: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * kind.size), dtype=np.uint8)


def with_ordinary_scales(raw: NDArray[np.uint8], kind: BlockType) -> NDArray[np.uint8]:
    """Returns the bytes of quantized GGUF blocks, in which the float16 scales are replaced by normally
    distributed numbers: random bytes could be NaN, which would hide a wrong code. kind: the GGUF type."""
    blocks = raw.reshape(-1, kind.size).copy()
    for index, offset in enumerate(HALVES[kind.name]):
        scales = np.random.default_rng(index).normal(size=len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(raw.shape)


def test_types_are_those_of_ggml() -> None:
    numbers = {int(number) for number in GGMLQuantizationType}
    assert not set(TYPES) & set(UNREADABLE) and numbers <= set(TYPES) | set(UNREADABLE)
    for number in numbers & set(UNREADABLE):
        assert UNREADABLE[number] == GGMLQuantizationType(number).name
    assert {kind.name for kind in TYPES.values()} >= CODEBOOKS
    for number, kind in TYPES.items():
        assert kind.number == number
        if number in numbers:
            assert kind.name == GGMLQuantizationType(number).name
            assert (kind.weights, kind.size) == GGML_QUANT_SIZES[GGMLQuantizationType(number)]


@each(KINDS)
def test_random_bytes(kind: BlockType) -> None:
    raw = random_rows(kind, 37, 40 if kind.weights > 1 else 4099)
    assert_same_bits(dequantized(raw, kind), expected(raw, kind))


@each(QUANTIZED)
def test_each_byte_takes_each_value(kind: BlockType) -> None:
    # 97 is prime to 256, so neighbouring bytes differ in all bits.
    raw = (np.arange(256)[:, None] + 97 * np.arange(kind.size)).astype(np.uint8)
    assert all(len(np.unique(raw[:, column])) == 256 for column in range(kind.size))
    raw = with_ordinary_scales(raw, kind)
    result = dequantized(raw, kind)
    assert not np.isnan(result).any() and len(np.unique(result)) > 256
    assert_same_bits(result, expected(raw, kind))


@each(QUANTIZED)
def test_special_scales(kind: BlockType) -> None:
    if kind.name in ("MXFP4", "NVFP4"):
        raw = random_rows(kind, 256, 4)
        raw.reshape(256, 4, kind.size)[:, :, : kind.weights // 16 if kind.name == "NVFP4" else 1] = np.arange(
            256
        )[:, None, None]
        assert_same_bits(dequantized(raw, kind), expected(raw, kind))
        return
    for moved in HALVES[kind.name]:
        raw = with_ordinary_scales(random_rows(kind, len(SPECIAL_HALVES), 4), kind)
        field = raw.reshape(len(SPECIAL_HALVES), 4, kind.size)[:, :, moved : moved + 2]
        field[:] = SPECIAL_HALVES.view(np.uint8).reshape(-1, 1, 2)
        result = dequantized(raw, kind)
        assert np.isnan(result).any() and np.isinf(result).any() and (result != 0).any()
        assert_same_bits(result, expected(raw, kind))


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_all_numbers_of_16_bits(dtype: DTypeLike) -> None:
    kind = TYPES[1 if dtype == np.float16 else 30]
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(16, -1)
    assert_same_bits(dequantized(raw, kind), expected(raw, kind))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights(name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    weights = np.random.default_rng(1).normal(scale=0.02, size=(19, 768)).astype(np.float32)
    weights[3] = 0
    raw = reference.quantize(weights, GGMLQuantizationType(kind.number)).view(np.uint8)
    result = dequantized(raw, kind)
    assert_same_bits(result, expected(raw, kind))
    # Most ternary codes of normally distributed weights are 0: the others exceed half of the largest weight.
    assert np.corrcoef(result.ravel(), weights.ravel())[0, 1] > (0.3 if name.startswith("TQ") else 0.99)


@pytest.mark.parametrize("name", INTEGERS_AND_DOUBLES)
def test_integers_and_doubles(name: str) -> None:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw = random_rows(kind, 5, 200)
    with np.errstate(all="ignore"):
        numbers = raw.view(INTEGERS_AND_DOUBLES[name]).astype(np.float32)
    assert_same_bits(dequantized(raw, kind), numbers)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kind=st.sampled_from(list(TYPES.values())))
def test_any_split_of_rows_and_chunks(data: st.DataObject, kind: BlockType) -> None:
    rows, blocks = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 5))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    raw = random_rows(kind, rows, blocks, data.draw(st.integers(0, 1000)))
    whole = dequantized(raw, kind)
    with mock.patch.object(gguf_blocks, "CHUNK", 256 * data.draw(st.integers(1, 4))):
        parts = [dequantized(part, kind) for part in np.split(raw, cuts)]
    assert_same_bits(np.concatenate(parts), whole)


@each(KINDS)
def test_more_than_one_chunk(kind: BlockType) -> None:
    raw = random_rows(kind, 3, gguf_blocks.CHUNK // kind.weights // 2 + 1)
    assert_same_bits(dequantized(raw, kind), expected(raw, kind))


@each(KINDS)
def test_rows_at_odd_addresses_and_apart(kind: BlockType) -> None:
    raw = random_rows(kind, 4, 8)
    wide = np.zeros((4, raw.shape[1] + 3), np.uint8)
    wide[:, 1:-2] = raw
    assert_same_bits(dequantized(wide[:, 1:-2], kind), expected(raw, kind))
    shifted = np.concatenate([np.zeros(1, np.uint8), raw.ravel()])[1:].reshape(raw.shape)
    assert shifted.ctypes.data % 2
    assert_same_bits(dequantized(shifted, kind), expected(raw, kind))


def test_threads_at_once() -> None:
    kind = TYPES[12]
    raw = random_rows(kind, 64, 32)
    out = np.empty((64, 32 * 256), np.float32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: dequantize(raw[row : row + 4], kind, out[row : row + 4]), range(0, 64, 4)))
    assert_same_bits(out, expected(raw, kind))


Q4_0 = TYPES[2]
BLOCKS = np.zeros((3, 36), np.uint8)


@pytest.mark.parametrize(
    ("raw", "kind", "out", "message"),
    [
        (
            np.zeros((3, 37), np.uint8),
            Q4_0,
            np.empty((3, 64), np.float32),
            "Q4_0: a row needs whole blocks of 18 bytes, got 37 bytes",
        ),
        (
            BLOCKS,
            Q4_0,
            np.empty((3, 32), np.float32),
            "Q4_0: out needs shape (3, 64) of contiguous float32, got shape (3, 32) of contiguous float32",
        ),
        (
            BLOCKS,
            Q4_0,
            np.empty((3, 64), np.float64),
            "Q4_0: out needs shape (3, 64) of contiguous float32, got shape (3, 64) of contiguous float64",
        ),
        (
            BLOCKS,
            Q4_0,
            np.empty((3, 128), np.float32)[:, ::2],
            "Q4_0: out needs shape (3, 64) of contiguous float32, got shape (3, 64) of strided float32",
        ),
        (
            BLOCKS.ravel(),
            Q4_0,
            np.empty((3, 64), np.float32),
            "Q4_0: raw needs two axes of uint8, got shape (108,) of uint8",
        ),
        (
            BLOCKS.view(np.int8),
            Q4_0,
            np.empty((3, 64), np.float32),
            "Q4_0: raw needs two axes of uint8, got shape (3, 36) of int8",
        ),
        (
            BLOCKS,
            BlockType("Q4_0", 2, 32, 36),
            np.empty((3, 32), np.float32),
            "BlockType(name='Q4_0', number=2, weights=32, size=36) is not in gguf_types.TYPES; "
            "pass one of its values",
        ),
    ],
)
def test_arguments_that_do_not_fit(
    raw: NDArray[np.uint8], kind: BlockType, out: NDArray[np.float32], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dequantize(raw, kind, out)
