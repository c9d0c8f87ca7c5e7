"""Tests of the order in which the codes of a row are packed into words, number by number."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.quant.groups import row_words
from mlcbuild.quant.row_packing import pack_codes, unpack_codes


@pytest.mark.parametrize("columns", [32, 64, 96, 160])
@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_every_code_is_at_its_place_and_comes_back(bits: int, columns: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, columns)).astype(np.uint8)
    words = pack_codes(codes, bits)
    assert words.dtype == np.uint32 and words.shape == (3, row_words(bits, columns))
    low = {3: 2, 8: 8}.get(bits, 4)
    high = bits - low
    for line, row in zip(codes.tolist(), words.tolist(), strict=True):
        stream = sum(word << 32 * i for i, word in enumerate(row))
        for i, code in enumerate(line):
            assert stream >> low * i & (1 << low) - 1 == code & (1 << low) - 1
            if high:
                assert stream >> low * columns + high * i & (1 << high) - 1 == code >> low
        assert stream >> (low + high) * columns == 0, "what is left of the last word is zero"
    assert unpack_codes(words, bits, columns // 32).tolist() == codes.tolist()
