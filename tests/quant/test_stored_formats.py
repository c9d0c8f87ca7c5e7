"""Tests of the formats in which quantized weights are stored, without the code that quantizes: shapes, sizes,
and which values are kept exactly. The formats are blocked (codes and scales of a checkpoint are kept),
leveled (scales in two levels) and plain (not quantized)."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.errors import CheckpointError
from mlcbuild.quant import block_packing, blocked, leveled
from mlcbuild.quant.blocks import BlockRows, Blocks
from mlcbuild.quant.floats import Scratch
from mlcbuild.quant.format import ITEM_BYTES, load_format
from mlcbuild.quant.plain import plain
from tests.schemes import normal

LAYOUTS = ("row", "x16")
LEVELED = ("q3l", "q4l", "q5l", "q6l")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*LEVELED, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k", "q2_k"])
def test_the_stated_bits_are_those_of_the_tensors(name: str, layout: str) -> None:
    form = load_format(name, layout)
    rows, columns = 64, 1024
    size = sum(np.prod(part.shape(rows, columns)) * ITEM_BYTES[part.dtype] for part in form.tensors)
    assert 8 * size / (rows * columns) == pytest.approx(form.bits_per_weight, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LEVELED)
def test_leveled_formats_quantize_any_matrix(name: str, layout: str) -> None:
    """Checks that the mean error of formats with scales in two levels is less than half a quantization step,
    the range of a group of 32 weights divided by its number of codes minus 1; with an ideal scale it would be
    a quarter. Checks, too, that both layouts, row by row and in tiles of 16 rows, hold the same numbers."""
    weight = normal(19, 512)
    form = load_format(name, layout)
    tensors = form.pack(weight, Scratch(), "a")
    assert [tensor.shape for tensor in tensors] == [part.shape(19, 512) for part in form.tensors]
    values = form.unpack(tensors, (19, 512))
    groups = weight.reshape(19, -1, 32).astype(np.float64)
    step = np.ptp(groups, axis=2) / (2**form.bits - 1)
    error = np.abs(values.reshape(groups.shape) - groups)
    assert error.mean() < 0.5 * step.mean(), "a quarter of a step is ideal"
    other = load_format(name, LAYOUTS[layout == "row"])
    same = other.unpack(other.pack(weight, Scratch(), "a"), (19, 512))
    np.testing.assert_array_equal(values, same, err_msg="both layouts hold the same numbers")


def parts(blocks: Blocks, rows: int, columns: int) -> BlockRows:
    random = np.random.default_rng(4)
    codes = (random.integers(0, 1 << blocks.bits, (rows, columns)) - blocks.zero).astype(np.int8)
    if blocks.minimum:
        codes = codes.astype(np.uint8)
    scale = np.exp(random.standard_normal((rows, columns // 32)) - 4).astype(np.float16).astype(np.float32)
    minimum = scale[::-1].copy() if blocks.minimum else None
    return BlockRows(codes, scale, minimum=minimum)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocked_formats_keep_codes_and_scales(name: str, layout: str) -> None:
    form = load_format(name, layout)
    assert form.blocks is not None and form.pack_blocks is not None
    rows = parts(form.blocks, 18, 96)
    values = form.unpack(form.pack_blocks([rows], "a"), (18, 96))
    expected = rows.codes.astype(np.float64) * np.repeat(rows.scale, 32, axis=1)
    if rows.minimum is not None:
        expected += np.repeat(rows.minimum, 32, axis=1)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    with pytest.raises(CheckpointError, match=r"^a: it is not quantized, and this"):
        form.pack(normal(18, 96), Scratch(), "a")


@pytest.mark.parametrize("number", [np.nan, np.inf, 2.0**120])
def test_scales_without_a_finite_product_are_refused(number: float) -> None:
    form = load_format("q8_0", "x16")
    assert form.blocks is not None
    rows = parts(form.blocks, 16, 32)
    rows.scale[3, 0] = number
    for pack in (block_packing.pack, block_packing.pack_rows):
        with pytest.raises(CheckpointError, match=r"^a: "):
            pack(form.blocks, [rows], "a")


def test_a_format_has_both_layouts() -> None:
    form = load_format("q4_k", "x16")
    assert form.blocks is not None
    assert set(blocked.both(form.blocks)) == set(leveled.both(form.blocks)) == set(LAYOUTS)
    assert plain("float16").bits_per_weight == 16 and plain("float32").tensors[0].shape(3, 5) == (3, 5)
