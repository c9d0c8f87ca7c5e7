"""Tests of the exact bytes of the two layouts of quantized matrices: `row` stores codes row by row, `x16` in
tiles of 16 rows."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.quant import Storage
from mlcbuild.quant.grouped import rows, tiles
from mlcbuild.quant.groups import TILE_ROWS, Groups
from tests.schemes import QUANTIZED, SCHEMES, normal, pack, unpack

GOLDEN = {
    # w = -7, -6 ... 8, twice: scale 1, so q counts from 0 to 15.
    "q4": ([i % 16 - 7 for i in range(32)], "1032547698badcfe" * 2),
    # w = -127, -126 ...: scale 1, q counts from 0.
    "q8": ([i - 127 for i in range(32)], bytes(range(32)).hex()),
}


@pytest.mark.parametrize("scheme", [s for s in QUANTIZED if s.layout == "row"], ids=lambda s: s.name)
def test_golden_bytes_of_row(scheme: Storage) -> None:
    weight, expected = GOLDEN[scheme.name[:2]]
    q_weight, q_scale = pack(np.array([weight], np.float32), scheme)
    assert q_weight.dtype == np.uint32
    assert q_weight.tobytes().hex() == expected
    assert q_scale.tobytes().hex() == {"float16": "003c", "float32": "0000803f"}[scheme.dtype]


def test_golden_bytes_of_x16() -> None:
    # Row 1 holds -8 ... 7 twice: scale 1, q = 0 ... 15 in both halves. The other rows are padding: q 8.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = [i % 16 - 8 for i in range(32)]
    q_weight, q_scale = pack(weight, SCHEMES["q4a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 256), (1, 1, 16))
    rows = q_weight.reshape(4, 16, 4)
    assert [part.tobytes().hex() for part in rows[:, 1]] == ["00112233", "44556677", "8899aabb", "ccddeeff"]
    assert (np.delete(rows, 1, axis=1) == 0x88).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_golden_bytes_of_x16_with_5_bits() -> None:
    # Row 1 holds -16 ... 15: scale 1, q = 0 ... 31. The other rows are padding: q 16.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = np.arange(32) - 16
    q_weight, q_scale = pack(weight, SCHEMES["q5a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 320), (1, 1, 16))
    rows = q_weight.reshape(5, 16, 4)
    nibbles = ["00112233", "44556677", "8899aabb", "ccddeeff"]
    assert [part.tobytes().hex() for part in rows[:, 1]] == [*nibbles, "f0f0f0f0"]
    assert (np.delete(rows[:4], 1, axis=1) == 0).all() and (np.delete(rows[4], 1, axis=0) == 0xFF).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_golden_bytes_of_x16_with_8_bits() -> None:
    # Row 1 holds -128 ... -97: scale 1, q = 0 ... 31. The other rows are padding: q 128.
    weight = np.zeros((2, 32), np.float32)
    weight[1] = np.arange(32) - 128
    q_weight, q_scale = pack(weight, SCHEMES["q8a8_1"])
    assert (q_weight.shape, q_scale.shape) == ((1, 1, 512), (1, 1, 16))
    rows = q_weight.reshape(8, 16, 4)
    assert rows[:, 1].tobytes() == bytes(range(32))
    assert (np.delete(rows, 1, axis=1) == 0x80).all()
    assert q_scale.tobytes().hex() == "0100003c" + "0100" * 14


def test_x16_takes_the_positive_one_of_two_equal_extremes() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :2] = -4, 4
    q_weight, q_scale = pack(weight, SCHEMES["q8a8_1"])
    assert q_scale[0, 0, 0] == -1 / 32
    assert unpack((q_weight, q_scale), SCHEMES["q8a8_1"], (1, 32))[0, :3].tolist() == [-4 + 1 / 32, 4, 0]


@pytest.mark.parametrize("bits", [4, 8])
def test_layouts_of_a_format_hold_the_same_numbers(bits: int) -> None:
    """Checks that the two layouts of a format hold the same values, so that a backend may choose either."""
    weight = normal(33, 100) * np.float32(0.02)
    results = []
    for layout in ("x16", "row"):
        scheme = Storage(f"q{bits}a8_1", f"q{bits}s", layout, 8)
        tensors = pack(weight, scheme)
        assert [part.shape for part in tensors] == [
            tensor.shape(*weight.shape) for tensor in scheme.definition.tensors
        ]
        results.append(unpack(tensors, scheme, weight.shape))
    assert np.array_equal(results[0], results[1])


def test_scales_may_have_another_dtype() -> None:
    """Checks that scales may have another dtype: the numbers of a format are parameters, so a new combination
    requires no code."""
    form = rows(Groups(8, 127, 254, "float32"))
    assert [(tensor.suffix, tensor.dtype) for tensor in form.tensors] == [
        ("q_weight", "uint32"),
        ("q_scale", "float32"),
    ]
    assert (form.bits_per_weight, form.rows_per_index) == (9, 1)
    assert tiles(Groups(5, 16, 31, "float16", signed=True)).rows_per_index == TILE_ROWS
