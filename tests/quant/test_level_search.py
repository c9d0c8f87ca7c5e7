"""Tests of the formats that quantize to blocks with scales in two levels."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import Storage
from mlcbuild.quant.blocks import BlockRows
from mlcbuild.quant.level_search import quantize
from tests.schemes import GPU_SCHEMES, SCHEMES, normal, pack, unpack

LEVELED = [s for s in SCHEMES.values() if s.definition.blocks is not None]
EVERY = pytest.mark.parametrize("scheme", LEVELED, ids=lambda scheme: scheme.format)
ROWS = [s for s in GPU_SCHEMES.values() if s.definition.blocks is not None]
LAYOUTS = pytest.mark.parametrize("scheme", [*LEVELED, *ROWS], ids=lambda s: f"{s.format}-{s.layout}")
Floats = NDArray[np.float32]


def blocks_of(scheme: Storage, weight: Floats) -> list[BlockRows]:
    blocks = scheme.definition.blocks
    assert blocks is not None
    return quantize(blocks, weight, "matrix")


def error(scheme: Storage, weight: Floats) -> float:
    """Returns the squared error of quantized weights, relative to the sum of the squared weights."""
    actual = unpack(pack(weight, scheme), scheme, weight.shape).astype(np.float64)
    return float(np.square(actual - weight).sum() / np.square(weight.astype(np.float64)).sum())


@LAYOUTS
@pytest.mark.parametrize("shape", [(64, 576), (16, 256), (33, 100), (1, 1), (17, 512)])
def test_stored_tensors_are_the_codes_and_numbers_of_the_search(
    scheme: Storage, shape: tuple[int, int]
) -> None:
    """Checks that each stored weight is code * scale + minimum of its group, even where rows and columns are
    padded."""
    weight = normal(*shape)
    expected = np.concatenate(
        [_values(part, scheme.definition.group_size) for part in blocks_of(scheme, weight)]
    )
    actual = unpack(pack(weight, scheme), scheme, shape)
    np.testing.assert_array_equal(actual, expected[:, : shape[1]])


def _values(rows: BlockRows, group: int) -> Floats:
    """Returns the float32 weights that quantized rows represent, computed one group of `group` columns at a
    time: code * scale, plus the minimum where the format stores one."""
    out = np.zeros(rows.codes.shape, np.float32)
    assert rows.steps is not None
    for g in range(rows.codes.shape[1] // group):
        block, columns = g * group // 256, slice(g * group, (g + 1) * group)
        scale = rows.scale[:, block] * rows.steps[:, g].astype(np.float32)
        out[:, columns] = rows.codes[:, columns].astype(np.float32) * scale[:, None]
        if rows.minimum is not None and rows.minimum_steps is not None:
            out[:, columns] += (rows.minimum[:, block] * rows.minimum_steps[:, g].astype(np.float32))[:, None]
    return out


@EVERY
def test_squared_error_against_an_exhaustive_search(scheme: Storage) -> None:
    """Checks the search for scales and minima of quantized groups: its squared error is close to the smallest
    one on a fine grid of unrounded scales and minima."""
    bits, group = scheme.bits, scheme.definition.group_size
    weight = normal(8, 512)
    groups = weight.reshape(-1, group).astype(np.float64)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    best = np.full(len(groups), np.inf)
    for lower in np.linspace(0.7, 1.05, 15):
        for upper in np.linspace(0.7, 1.05, 15):
            if scheme.definition.blocks is not None and scheme.definition.blocks.minimum:
                scale = (high * upper - low * lower) / (2**bits - 1)
                codes = np.clip(np.rint((groups - low * lower) / scale), 0, 2**bits - 1)
                values = codes * scale + low * lower
            else:
                extreme = np.where(high >= -low, high, low)
                scale = extreme * lower / -(2 ** (bits - 1)) * (upper / 0.9)
                values = np.clip(np.rint(groups / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
            best = np.minimum(best, np.square(values - groups).sum(1))
    exhaustive = best.sum() / np.square(groups).sum()
    assert error(scheme, weight) < {3: 1.1, 4: 1.08, 5: 1.1, 6: 1.3}[bits] * exhaustive


@EVERY
def test_more_bits_lose_less_than_one_scale_a_group(scheme: Storage) -> None:
    """Checks that scales in two levels reduce the squared error of normally distributed weights. The formats
    with a minimum per group lose at most 0.76 times as much as the format of as many bits with one scale per
    group, for an eighth of a bit more per weight."""
    weight = normal(64, 1024)
    if scheme.bits == 3:
        assert error(scheme, weight) < 4.6 * error(SCHEMES["q4a8_2"], weight)
    elif scheme.bits < 6:
        assert error(scheme, weight) < 0.76 * error(SCHEMES[f"q{scheme.bits}a8_1"], weight)
    else:
        assert SCHEMES["q8a8_1"].definition.bits_per_weight > scheme.definition.bits_per_weight
        assert error(scheme, weight) < 0.3 * error(SCHEMES["q5a8_1"], weight)


@EVERY
def test_a_group_of_small_weights_beside_large_ones_keeps_its_values(scheme: Storage) -> None:
    """Checks that a group of small weights beside large ones keeps its precision, because each group has its
    own integer factor of the block's scale."""
    weight = normal(16, 256)
    weight[:, :32] *= 0.01
    actual = unpack(pack(weight, scheme), scheme, weight.shape)
    small = np.square(actual - weight)[:, :32].sum() / np.square(weight[:, :32]).sum()
    assert small < {3: 0.5, 4: 0.2, 5: 0.06, 6: 0.01}[scheme.bits]


@EVERY
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-3, -1e-3, 6e4, -6e4])
def test_groups_of_equal_weights_are_kept(scheme: Storage, value: float) -> None:
    weight = np.full((16, 256), value, np.float32)
    actual = unpack(pack(weight, scheme), scheme, weight.shape)
    np.testing.assert_allclose(actual, weight, rtol=5e-3, atol=0)


@LAYOUTS
def test_bfloat16_and_float16_are_widened(scheme: Storage) -> None:
    weight = (normal(16, 256).view(np.uint32) & 0xFFFF0000).view(np.float32)
    halves = weight.astype(np.float16)
    bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
    for raw, wide in ((bits, weight), (halves, halves.astype(np.float32))):
        for actual, expected in zip(pack(raw, scheme), pack(wide, scheme), strict=True):
            np.testing.assert_array_equal(actual, expected)


@LAYOUTS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(scheme: Storage, value: float) -> None:
    weight = normal(16, 256)
    weight[3, 5] = value
    with pytest.raises(CheckpointError, match="matrix: it holds infinite or NaN weights"):
        pack(weight, scheme)


@EVERY
def test_scales_beyond_float16_are_refused(scheme: Storage) -> None:
    weight = normal(16, 256)
    weight[3, 5] = 3e38
    with pytest.raises(CheckpointError, match="matrix: it holds weights that need a scale of"):
        pack(weight, scheme)


def calibrated(scheme: Storage, weight: Floats, importance: Floats) -> Floats:
    """Returns the dequantized values of `weight` after it is quantized so that errors in columns of high
    importance count more. importance: one factor for each column."""
    pack_calibrated = scheme.definition.pack_calibrated
    assert pack_calibrated is not None
    return unpack(tuple(pack_calibrated(weight, importance, "matrix")), scheme, weight.shape)


@EVERY
@pytest.mark.parametrize("columns", [512, 330])
def test_importance_lowers_the_error_that_it_weighs(scheme: Storage, columns: int) -> None:
    weight = normal(32, columns)
    importance = np.exp(2 * np.random.default_rng(4).standard_normal(columns)).astype(np.float32)

    def weighed(values: Floats) -> float:
        return float((np.square(values.astype(np.float64) - weight) * importance).sum())

    plain = unpack(pack(weight, scheme), scheme, weight.shape)
    # With 6 bits only the scale follows the importance, and codes are as fine as its steps.
    bound = {3: 0.8, 4: 0.85, 5: 0.95, 6: 1.0}[scheme.bits]
    assert weighed(calibrated(scheme, weight, importance)) < bound * weighed(plain)


@EVERY
def test_equal_importance_of_any_size_loses_no_more_than_no_calibration(scheme: Storage) -> None:
    weight = normal(16, 512)
    for size in (1e-20, 1.0, 1e20):
        actual = calibrated(scheme, weight, np.full(512, size, np.float32))
        squares = np.square(actual.astype(np.float64) - weight).sum() / np.square(weight).sum()
        assert squares < 1.001 * error(scheme, weight)


@EVERY
def test_columns_without_activations_keep_values(scheme: Storage) -> None:
    weight = normal(16, 512)
    for importance in (np.zeros(512, np.float32), np.eye(1, 512, 7, np.float32)[0]):
        actual = calibrated(scheme, weight, importance)
        relative = np.square(actual - weight).sum() / np.square(weight).sum()
        assert relative < 1.5 * error(scheme, weight) + 0.05
