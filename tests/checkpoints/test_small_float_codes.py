"""Tests of matrices of 4-bit floats with scales, compared with the values that the bits of E2M1 and E8M0
represent."""

from __future__ import annotations

import numpy as np

from mlcbuild.checkpoints.small_float_codes import Fp4Matrix
from tests.checkpoints.stored_rows import ArrayReader


def e2m1(code: int) -> float:
    """Returns the value of a 4-bit float in the format e2m1, where `code` has a sign bit, two bits of
    exponent and one bit of mantissa, from high to low."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code & 8 else size


def test_powers_of_two_scale_groups() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (3, 4))  # 64 columns
    scales = np.array([[127, 128], [120, 130], [0, 250]], np.uint8)
    reader = ArrayReader({"packed": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scales})
    matrix = Fp4Matrix(reader.tensor("packed", "U8"), reader.tensor("scale", "U8"), 64, 32)
    expected = [
        [e2m1(code) * 2.0 ** (int(scales[row, column // 32]) - 127) for column, code in enumerate(line)]
        for row, line in enumerate(codes.tolist())
    ]
    assert matrix.load(reader, 0, 3).tolist() == np.array(expected, np.float32).tolist()
    assert matrix.load(reader, 1, 1).tolist() == np.array(expected[1:2], np.float32).tolist()
    rows = matrix.unpack(reader, 1, 2)
    assert (rows.codes * np.repeat(rows.scale, 32, axis=1)).tolist() == np.array(
        expected[1:], np.float32
    ).tolist()


def test_8_bit_scales_are_multiplied_or_divided_by_that_of_the_matrix() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, 1))
    e4m3 = np.array([[0x38], [0x48]], np.uint8)  # 1.0 and 4.0
    arrays = {
        "packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "scale": e4m3,
        "overall": np.array([0.25], np.float32),
    }
    reader = ArrayReader(arrays)
    tensors = reader.tensor("packed", "U8"), reader.tensor("scale", "F8_E4M3")
    overall = reader.tensor("overall", "F32")
    values = np.array([e2m1(code) for code in range(16)], np.float32)
    for divides, factor in ((False, 0.25), (True, 4.0)):
        rows = Fp4Matrix(*tensors, 16, 16, overall, divides).load(reader, 0, 2)
        assert rows.tolist() == [(values * factor).tolist(), (values * factor * 4).tolist()]
