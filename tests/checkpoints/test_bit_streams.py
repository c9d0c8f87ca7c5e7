"""Tests of unpacking integers of a few bits from words, compared with Python's integers of unlimited size."""

from __future__ import annotations

import numpy as np
import pytest

from mlcbuild.checkpoints.bit_streams import unpacked, unpacked_fields

WORDS = np.random.default_rng(5).integers(0, 1 << 32, (3, 6), np.uint32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_line_is_one_stream_of_bits_lowest_first(bits: int) -> None:
    codes = unpacked(WORDS, bits)
    assert codes.dtype == np.uint8 and codes.shape == (3, 6 * 32 // bits)
    for line, words in zip(codes, WORDS, strict=True):
        stream = int.from_bytes(words.astype("<u4").tobytes(), "little")
        assert line.tolist() == [stream >> bits * i & (1 << bits) - 1 for i in range(len(line))]


@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_do_not_cross_words(bits: int) -> None:
    expected = [
        [int(word) >> bits * i & (1 << bits) - 1 for word in line for i in range(32 // bits)]
        for line in WORDS
    ]
    assert unpacked_fields(WORDS, bits).tolist() == expected


def test_words_of_any_size_and_order_in_memory() -> None:
    assert unpacked(WORDS.view(np.uint8), 3).tolist() == unpacked(WORDS, 3).tolist()
    assert unpacked(WORDS[:, ::2], 4).tolist() == unpacked(WORDS[:, ::2].copy(), 4).tolist()
