"""Tests of packing codes of 3 to 8 bits into tiles of 16 rows. Each bit is expected at the place that the
definition of the layout states."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlcbuild.quant import block_packing
from mlcbuild.quant.blocks import BlockRows, Blocks
from mlcbuild.quant.groups import low_bits

ROWS, COLUMNS = 37, 512
BITS = pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])


def rows_of(bits: int, seed: int) -> BlockRows:
    """Returns a random matrix as quantized rows: codes of `bits` bits, with float16 scales and minima for
    each 256 columns and 8-bit factors of both for each 32."""
    rng = np.random.default_rng(seed)
    shape = ROWS, COLUMNS // 32
    numbers = [rng.standard_normal((ROWS, COLUMNS // 256)).astype(np.float16) for _ in range(2)]
    return BlockRows(
        rng.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.uint8),
        numbers[0].astype(np.float32),
        rng.integers(-127, 128, shape).astype(np.int8),
        numbers[1].astype(np.float32),
        rng.integers(0, 256, shape).astype(np.uint8),
    )


def described(bits: Literal[3, 4, 5, 6, 8]) -> Blocks:
    return Blocks(bits, scale="levels", minimum=True, signed=False)


def code_in(line: NDArray[np.uint8], bits: int, row: int, column: int) -> int:
    """Returns one quantized code of a group of 32 columns in a tile of 16 rows, read bit by bit by the
    definition of the layout. line: bytes of the group in the tile; bits: size of a code; row, column: place
    within the group."""
    quad, place = divmod(column, 4)
    low = low_bits(bits)
    lines, code = 8 * low // 8, 0
    for bit in range(bits):
        if bit < low:
            number, shift = quad % lines, low * (quad // lines) + bit
        else:
            number, shift = divmod((bits - low) * quad + bit - low, 8)
            number += lines
        code |= (int(line[64 * number + 4 * row + place]) >> shift & 1) << bit
    return code


@BITS
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_bit_has_its_place_and_unpacking_restores_the_weights(
    bits: Literal[3, 4, 5, 6, 8], seed: int
) -> None:
    rows = rows_of(bits, seed)
    tensors = block_packing.pack(described(bits), [rows], "matrix")
    q_weight = tensors[0]
    assert q_weight.shape == (3, COLUMNS // 32, 64 * bits)
    rng = np.random.default_rng(seed)
    for row, column in zip(rng.integers(0, ROWS, 100), rng.integers(0, COLUMNS, 100), strict=True):
        line = q_weight[row // 16, column // 32]
        assert code_in(line, bits, int(row) % 16, int(column) % 32) == rows.codes[row, column]
    assert not q_weight[2].reshape(-1, bits, 16, 4)[:, :, 5:].any(), "rows of padding are zeros"
    actual = block_packing.unpack(described(bits), tensors, (ROWS, COLUMNS))
    assert rows.steps is not None and rows.minimum is not None and rows.minimum_steps is not None
    scale = np.repeat(rows.scale, 8, axis=1) * rows.steps
    minimum = np.repeat(rows.minimum, 8, axis=1) * rows.minimum_steps
    expected = rows.codes * np.repeat(scale, 32, axis=1) + np.repeat(minimum, 32, axis=1)
    np.testing.assert_array_equal(actual, expected.astype(np.float32))
