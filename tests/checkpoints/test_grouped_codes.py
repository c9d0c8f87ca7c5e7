"""Tests of matrices of integer codes with scales and zero points or minima, and of choosing the stored format
that holds their values exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcbuild.checkpoints.grouped_codes import GroupedMatrix, Read, is_half
from mlcbuild.checkpoints.shards import RowReader
from mlcbuild.checkpoints.stored_parts import StoredParts
from tests.checkpoints.stored_rows import ArrayReader

RNG = np.random.default_rng(6)
READER = ArrayReader({"qweight": np.zeros((4, 8), np.int32)})
PARTS = StoredParts("model.layers.0.mlp.down_proj", {"qweight": READER.tensor("qweight", "I32")})
HALVES = (RNG.integers(1, 9, (4, 2)) / 16).astype(np.float32)


def of(array: NDArray[Any]) -> Read:
    def read(_: RowReader, first: int, count: int) -> NDArray[Any]:
        return array[first : first + count].copy()

    return read


def matrix(bits: int = 4, **changes: Any) -> GroupedMatrix:
    """Returns a matrix of integer codes with 4 rows, 64 columns and two groups per row. changes: fields to
    replace."""
    codes = RNG.integers(0, 1 << bits, (4, 64)).astype(np.uint8)
    return GroupedMatrix(4, 64, bits, 32, **{"codes": of(codes), "scales": of(HALVES), **changes})


def values(own: GroupedMatrix) -> NDArray[np.float32]:
    """Returns the first 4 rows of a matrix of quantized codes as float32 weights, each computed in Python
    floats as (code - zero point) * scale + minimum and rounded once."""
    codes, scales = own.codes(READER, 0, 4), own.scales(READER, 0, 4)
    zeros = own.zeros(READER, 0, 4) if own.zeros else np.zeros_like(scales)
    minima = own.minima(READER, 0, 4) if own.minima else np.zeros_like(scales)
    groups = [column // own.group for column in range(64)] if own.places is None else own.places.tolist()
    return np.array(
        [
            [
                (float(codes[row, column]) - float(zeros[row, g])) * float(scales[row, g])
                + float(minima[row, g])
                for column, g in enumerate(groups)
            ]
            for row in range(4)
        ],
        np.float32,
    )


@pytest.mark.parametrize(
    "own",
    [
        matrix(),
        matrix(zeros=of(RNG.integers(0, 16, (4, 2)))),
        matrix(minima=of(-HALVES)),
        matrix(places=np.array([0, 1] * 32)),
    ],
    ids=["scales", "zeros", "minima", "places"],
)
def test_a_weight_is_computed_by_its_group(own: GroupedMatrix) -> None:
    np.testing.assert_array_equal(own.load(READER, 0, 4), values(own))
    np.testing.assert_array_equal(own.load(READER, 2, 1), values(own)[2:3])


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (matrix(zeros=of(np.full((4, 2), 8))), "Q4_0"),
        (matrix(zeros=of(np.array([[0, 15]] * 4))), "Q4_1"),
        (matrix(zeros=of(np.array([[8, 9]] * 4))), "Q4_1"),
        (matrix(5, zeros=of(np.full((4, 2), 16))), "Q5_0"),
        (matrix(8, zeros=of(np.full((4, 2), 128))), "Q8_0"),
        (matrix(8), "F32"),
        (matrix(minima=of(-HALVES)), "Q4_1"),
        (matrix(5, minima=of(-HALVES)), "Q5_1"),
        (matrix(6, minima=of(-HALVES)), "Q6_1"),
        (matrix(scales=of(HALVES + np.float32(1e-6))), "F32"),
        (matrix(places=np.array([0, 1] * 32)), "F32"),
    ],
)
def test_the_smallest_type_that_holds_a_matrix_exactly(own: GroupedMatrix, kind: str) -> None:
    tensor = own.tensor(PARTS, "a note")
    assert (tensor.dtype, tensor.shape, tensor.name) == (kind, (4, 64), f"{PARTS.module}.weight")
    np.testing.assert_array_equal(tensor.load(READER, 0, 4), values(own))
    assert (tensor.unpack is None) == (kind == "F32") == ("no format below float32" in tensor.note)
    if tensor.unpack is not None:
        rows = tensor.unpack(READER, 0, 4)
        wide: Callable[[Any], Any] = lambda numbers: np.repeat(numbers, 32, axis=1)  # noqa: E731
        minimum = 0 if rows.minimum is None else wide(rows.minimum)
        np.testing.assert_array_equal(rows.codes * wide(rows.scale) + minimum, values(own))
        least, greatest = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}.get(kind, (0, 63))
        assert least <= rows.codes.min() and rows.codes.max() <= greatest


def test_numbers_that_float16_holds() -> None:
    assert is_half(np.array([0, -1.5, 65504, 2.0**-24], np.float32))
    for wrong in (65520, 1 + 2.0**-11, 2.0**-25, np.inf, np.nan):
        assert not is_half(np.array([1, wrong], np.float32))
