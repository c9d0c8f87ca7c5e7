"""Tests that compare packed tensors with a definition in plain Python, which computes one number at a
time."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import Storage, packing
from mlcbuild.quant.floats import Array
from tests import libharness
from tests.schemes import QUANTIZED, normal, pack, unpack

EVERY = pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda scheme: scheme.name)
PROPERTY = settings(max_examples=15 if libharness.EVERY else 6, deadline=None, derandomize=True)
Matrix = NDArray[np.float32]


def f32(value: float) -> float:
    """Returns a Python float rounded to float32. For one sum or quotient of float32 numbers this equals the
    float32 operation.
    """
    return float(struct.unpack("f", struct.pack("f", value))[0])


def stored_scale(value: float, scheme: Storage) -> float:
    return f32(value) if scheme.dtype == "float32" else float(struct.unpack("e", struct.pack("e", value))[0])


def quantized_group(group: list[float], scheme: Storage) -> tuple[list[int], float]:
    """Returns (codes, scale) of a group of 32 weights, computed one weight at a time by the definition of the
    format that `scheme` uses."""
    extreme = max(group) if max(group) >= -min(group) else min(group)
    zero = 2 ** (scheme.bits - 1) - (scheme.layout == "row")
    if scheme.bits < 8:
        wide = fit(group, extreme, scheme.bits) * (1 if scheme.layout == "row" else -1)
        top = 2**scheme.bits - 1
    elif scheme.layout == "row":
        top, wide = 254, f32(abs(extreme) / 127)
    else:
        top, wide = 255, f32(extreme / -128)
    scale = stored_scale(wide, scheme)
    if scale == 0 and scheme.layout == "row":
        return [zero] * 32, 0.0
    scale = scale or 2.0**-24
    return [min(max(round(f32(f32(w / scale) + zero)), 0), top) for w in group], scale


def fit(group: list[float], extreme: float, bits: int) -> float:
    """Returns the scale of a group of weights for the levels -7 to 8 (4 bits) or -15 to 16 (5 bits), computed
    by the definition of the format's search. extreme: the weight of the largest magnitude."""
    if abs(extreme) < 2**-96:
        return 0.0
    unit, shift, widths, high = (504, 3, (63, 72, 59), 8) if bits == 4 else (240, 4, (15, 16), 16)
    inverse = f32(unit / extreme)
    units = [round(f32(w * inverse)) for w in group]
    best, most = 0.0, 0.0
    for width in widths:
        codes = [min(max(math.floor(Fraction(u, width) + Fraction(1, 2)), 1 - high), high) for u in units]
        along = sum((abs(u) >> shift) * u * c for u, c in zip(units, codes, strict=True))
        fitted = f32(along / sum((abs(u) >> shift) * c * c for u, c in zip(units, codes, strict=True)))
        if f32(fitted * along) > most:
            best, most = fitted, f32(fitted * along)
    return f32(extreme * f32(best / unit))


def definition(weight: Matrix, scheme: Storage) -> tuple[bytes, bytes, Matrix]:
    """Returns (bytes of the packed codes, bytes of the scales, the dequantized matrix) of a matrix, computed
    one weight at a time by the definition of the format and the layout that `scheme` uses."""
    rows, columns = weight.shape
    tile = 16 if scheme.layout == "x16" else 1
    groups, tiles = -(-columns // 32), -(-rows // tile)
    words = np.zeros((tiles, groups, tile * 4 * scheme.bits), np.uint8)
    scales = np.zeros((tiles, groups, tile), scheme.dtype)
    values = np.zeros((tiles * tile, groups * 32), np.float32)
    for row in range(tiles * tile):
        line = [float(w) for w in weight[row]] if row < rows else []
        line += [0.0] * (groups * 32 - len(line))
        t, r = divmod(row, tile)
        for g in range(groups):
            q, scale = quantized_group(line[g * 32 : g * 32 + 32], scheme)
            scales[t, g, r] = scale
            for k, number in enumerate(q):
                zero = 2 ** (scheme.bits - 1) - (tile == 1)
                values[row, g * 32 + k] = f32((number - zero) * scale)
                if tile == 16:
                    place, high = (k, 0) if scheme.bits == 8 else (k % 16, k // 16)
                    whole = number if scheme.bits == 8 else number & 15
                    words[t, g, place // 4 * 64 + r * 4 + k % 4] |= whole << (4 * high)
                    if scheme.bits == 5:
                        words[t, g, 256 + r * 4 + k % 4] |= number >> 4 << k // 4
                else:
                    words[t, g, k * scheme.bits // 8] |= number << (k * scheme.bits % 8)
    return words.tobytes(), scales.tobytes(), values[:rows, :columns]


def matrices(least: float = 0.0) -> st.SearchStrategy[Matrix]:
    """Returns a Hypothesis strategy for small matrices of any shape, whose elements are zeros or have
    magnitudes from `least` to 65504, the largest float16."""
    magnitude = st.floats(np.float32(least).item(), 65504.0, width=32)
    signed = st.builds(lambda sign, value: sign * value, st.sampled_from((1.0, -1.0)), magnitude)
    elements = st.sampled_from((0.0, -0.0)) | signed
    return st.tuples(st.integers(1, 18), st.integers(1, 70)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=elements)
    )


@EVERY
@PROPERTY
@given(weight=matrices())
def test_equals_the_definition(scheme: Storage, weight: Matrix) -> None:
    q_weight, q_scale = pack(weight, scheme)
    words, scales, values = definition(weight, scheme)
    assert q_weight.tobytes() == words
    assert q_scale.tobytes() == scales
    assert np.array_equal(unpack((q_weight, q_scale), scheme, (len(weight), weight.shape[1])), values)


@EVERY
def test_equals_the_definition_on_normal_weights(scheme: Storage) -> None:
    weight = normal(33, 100) * np.float32(0.02)
    q_weight, q_scale = pack(weight, scheme)
    assert (q_weight.tobytes(), q_scale.tobytes()) == definition(weight, scheme)[:2]


@EVERY
@PROPERTY
@given(weight=matrices())
def test_error_is_at_most_half_a_step_but_for_clipping(scheme: Storage, weight: Matrix) -> None:
    q_weight, q_scale = pack(weight, scheme)
    shape = (len(weight), weight.shape[1])
    error = np.abs(weight.astype(np.float64) - unpack((q_weight, q_scale), scheme, shape))
    by_row = q_scale if scheme.layout == "row" else q_scale.transpose(0, 2, 1).reshape(-1, q_scale.shape[1])
    step = np.repeat(by_row.astype(np.float64), 32, axis=1)[: shape[0], : shape[1]]
    largest = 2 ** (scheme.bits - 1) - 1
    # A quotient in float32 is off by at most 2**-23 of its size, 2**-16 of a step; a zero scale loses all.
    allowed = np.abs(step) * (0.5 + 2**-15) + np.maximum(np.abs(weight) - largest * np.abs(step), 0)
    assert (error <= allowed).all()


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.bits == 8], ids=lambda s: s.name)
@PROPERTY
@given(weight=matrices(least=0.125))
def test_packing_again_changes_nothing(scheme: Storage, weight: Matrix) -> None:
    shape = (len(weight), weight.shape[1])
    first = pack(weight, scheme)
    again = pack(unpack(first, scheme, shape), scheme)
    assert [part.tobytes() for part in first] == [part.tobytes() for part in again]


@EVERY
def test_groups_are_independent(scheme: Storage) -> None:
    weight = normal(48, 160)
    order = np.random.default_rng(1).permutation(5)
    moved = weight.reshape(48, 5, 32)[:, order].reshape(48, 160)
    q_weight, q_scale = pack(weight, scheme)
    other_weight, other_scale = pack(moved, scheme)
    parts = q_weight.shape[1] // 5 if scheme.layout == "row" else 1
    expected = q_weight.reshape(len(q_weight), 5, parts, -1)[:, order].reshape(q_weight.shape)
    assert np.array_equal(other_weight, expected)
    assert np.array_equal(other_scale, q_scale[:, order])


@EVERY
@pytest.mark.parametrize("block", [32, 1 << 11, 1 << 20])
def test_block_size_changes_no_bit(scheme: Storage, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(101, 300)
    expected = pack(weight, scheme)
    monkeypatch.setattr(packing, "BLOCK", block)
    actual = pack(weight, scheme)
    assert [part.tobytes() for part in actual] == [part.tobytes() for part in expected]


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_widened_exactly(scheme: Storage, dtype: str) -> None:
    weight = normal(20, 90) * np.float32(0.01)
    narrowed: Array
    if dtype == "bfloat16":
        narrowed = (weight.view(np.uint32) >> 16).astype(np.uint16)
        wide = (narrowed.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        narrowed = weight.astype(np.float16)
        wide = narrowed.astype(np.float32)
    else:
        with pytest.raises(TypeError, match="cannot pack float64"):
            pack(weight.astype(np.float64), scheme)
        return
    expected, actual = pack(wide, scheme), pack(narrowed, scheme)
    assert [part.tobytes() for part in actual] == [part.tobytes() for part in expected]


def unit(scheme: Storage) -> int:
    """Returns the magnitude that the largest weight of a group must have so that, if all weights of the group
    are integers, the format stores them with the scale 1 (-1 in the layout x16)."""
    return {4: 8, 5: 16, 8: 128 - (scheme.layout == "row")}[scheme.bits]


@EVERY
def test_zeros_negative_zeros_and_padding_decode_to_zero(scheme: Storage) -> None:
    weight = np.full((17, 40), -0.0, np.float32)
    weight[3] = unit(scheme)
    q_weight, q_scale = pack(weight, scheme)
    whole = unpack((q_weight, q_scale), scheme, (32 if scheme.layout == "x16" else 17, 64))
    assert (whole[3, :40] == unit(scheme)).all()
    whole[3, :40] = 0
    assert not whole.any()
    assert not np.signbit(q_scale[q_scale == 0]).any()


@EVERY
def test_a_group_whose_scale_underflows_becomes_zero_or_multiples_of_the_least(scheme: Storage) -> None:
    weight = np.full((1, 64), unit(scheme), np.float32)
    weight[0, :32] = 1e-7 if scheme.dtype == "float16" else 1e-45
    q_weight, q_scale = pack(weight, scheme)
    actual = unpack((q_weight, q_scale), scheme, (1, 64))
    if scheme.layout == "x16":
        assert (q_scale != 0).all() and (actual[0, :32] == 2.0**-23).all()  # 1.7 * 2**-24
    else:
        assert (actual[0, :32] == 0).all()
    assert (actual[0, 32:] == unit(scheme)).all()


@EVERY
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_not_finite_weights_are_refused(scheme: Storage, value: float, dtype: type[np.float32]) -> None:
    weight = np.ones((20, 64), dtype)
    weight[17, 40] = value
    with pytest.raises(CheckpointError, match=r"^lm_head: it holds infinite or NaN weights.*repair"):
        pack(weight, scheme, "lm_head")


@EVERY
def test_a_scale_beyond_float16_is_refused(scheme: Storage) -> None:
    weight = np.full((1, 32), 65520 * unit(scheme), np.float32)
    if scheme.dtype == "float32":
        pack(weight, scheme)
        return
    with pytest.raises(
        CheckpointError, match=r"^embed: it holds weights that need a scale of 65520, beyond.*q0f32"
    ):
        pack(weight, scheme, "embed")
    pack(weight * np.float32(0.999), scheme)
