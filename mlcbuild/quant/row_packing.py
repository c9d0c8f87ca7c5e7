"""Packs matrices into the layout `row`, and unpacks them: the codes of each row packed in uint32 words, with
an array of scales and minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcbuild.quant.blocks import BLOCK_WEIGHTS, Blocks, FloatCode
from mlcbuild.quant.floats import Array
from mlcbuild.quant.groups import GROUP, low_bits, row_words


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Packs the codes of rows, uint8 [rows, columns], each below 2**bits, into words and returns uint32
    [rows, words]. Codes of 4 or 8 bits fill words from their low ends; of 5 and 6 bits the low four, of 3
    bits the low two of all codes in a row come first, then their high bits. columns: a multiple of 32; words:
    padded with zeros to a multiple of 4."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    columns = codes.shape[1]
    low = low_bits(bits)
    wide: NDArray[np.uint32] = codes.astype(np.uint32)
    parts = [_in_words(wide & np.uint32((1 << low) - 1), low)]
    if bits > low:
        parts.append(_in_words(wide >> np.uint32(low), bits - low))
    words = np.concatenate(parts, axis=1)
    return np.pad(words, ((0, 0), (0, row_words(bits, columns) - words.shape[1])))


def unpack_codes(words: NDArray[np.uint32], bits: int, groups: int) -> NDArray[np.uint8]:
    """Unpacks the codes of rows, of 3, 4, 5, 6 or 8 bits, and returns uint8 [rows, groups * 32]. words:
    uint32 [rows, words], which hold them from the low ends on: of 5 and 6 bits the low four, of 3 bits the
    low two of all codes in a row come first, then their high bits."""
    columns = groups * GROUP
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)
    low = low_bits(bits)
    first = columns * low // 32
    codes = _from_words(words[:, :first], low)
    if bits > low:
        codes |= _from_words(words[:, first : first + columns * (bits - low) // 32], bits - low) << low
    return codes


def _in_words(fields: NDArray[np.uint32], width: int) -> NDArray[np.uint32]:
    """Packs `fields`, numbers below 2**width [rows, columns], into words of 32 bits, the first into the
    lowest bits, and returns uint32 [rows, columns * width / 32]. width: 1, 2 or 4; columns: a multiple of 32
    / width."""
    places = np.arange(32 // width, dtype=np.uint32) * np.uint32(width)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(
        fields.reshape(len(fields), -1, 32 // width) << places, axis=2
    )
    return words


def _from_words(words: NDArray[np.uint32], width: int) -> NDArray[np.uint8]:
    """Returns the numbers of `width` bits that are packed in words of 32 bits, the first in the lowest bits,
    as uint8 [rows, words * 32 / width]. words: uint32 [rows, words]; width: 1, 2 or 4."""
    places = np.arange(32 // width, dtype=np.uint32) * np.uint32(width)
    fields: NDArray[np.uint8] = (words[:, :, None] >> places & ((1 << width) - 1)).astype(np.uint8)
    return fields.reshape(len(words), -1)


def pack_blocks(blocks: Blocks, conformed: Sequence[NDArray[np.generic]]) -> tuple[Array, Array]:
    """Packs a quantized matrix row by row (the layout `row`) and returns (q_weight, q_scale). q_weight is
    uint32 [rows, words] with the packed codes. q_scale has the scales [rows, groups] in the format's type;
    with minima it is uint32, a scale's float16 in the low half of a word and the minimum's in the high half.
    With two-level scales it is uint32: for each 256 weights a word with their float16 numbers, then the
    groups' 8-bit factors, four to a word. blocks: types of codes and scales; conformed: the arrays of codes
    (from 0, as they are stored), scales and minima, already in these types; of two-level ones, the factors
    precede the float16 numbers."""
    codes, *numbers = conformed
    words = pack_codes(codes.astype(np.uint8, copy=False), blocks.bits)
    if blocks.scale == "levels":
        return words, _levels(numbers, BLOCK_WEIGHTS // blocks.group)
    if not blocks.minimum:
        return words, numbers[0].astype(blocks.scale, copy=False)
    pair = [number.astype(np.float16).view(np.uint16).astype(np.uint32) for number in numbers]
    return words, pair[0] | pair[1] << np.uint32(16)


def _levels(numbers: Sequence[NDArray[np.generic]], each: int) -> Array:
    """Packs the two-level scales and minima of a matrix into 32-bit words and returns them, uint32 [rows,
    blocks * words of a block]. A block is 256 weights of a row. Its first word has the float16 of its scales
    in the low half and that of its minima, if there are any, in the high half. Then come the factors of its
    scales (int8), four to a word, the first in the lowest byte, and those of its minima (uint8).

    numbers: the scales' factors [rows, groups] and float16 numbers [rows, blocks], then those of the minima
    if there are any. each: number of groups in a block, a multiple of 4; the last block of a row is padded
    with zeros.
    """
    rows, count = numbers[1].shape
    steps = [
        np.pad(step.astype(np.uint8), ((0, 0), (0, count * each - step.shape[1]))) for step in numbers[::2]
    ]
    halves = [block.astype(np.float16).view(np.uint16).astype(np.uint32) for block in numbers[1::2]]
    first = halves[0] if len(halves) == 1 else halves[0] | halves[1] << np.uint32(16)
    words = [step.reshape(rows, count, -1).view(np.uint32) for step in steps]
    return np.concatenate([first[:, :, None], *words], axis=2).reshape(rows, -1)


def unpack_blocks(blocks: Blocks, tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Dequantizes a matrix that is stored row by row (the layout `row`) and returns float32 [N, K]: code *
    scale + minimum, each operation rounded to float32; without minima, code * scale. Of signed codes, the
    offset with which they are stored is subtracted first; codes that are 8-bit floats, or stand for integers
    of a table, are converted. blocks: types of codes and scales; tensors: q_weight with the packed codes, and
    q_scale with scales and minima; shape: (N, K)."""
    rows, columns = shape
    words, numbers = tensors
    codes = unpack_codes(words.view(np.uint32), blocks.bits, -(-columns // GROUP)) - np.uint8(blocks.zero)
    value = code_values(blocks, codes).reshape(rows, -1, blocks.group)
    scale, minimum = _scales(blocks, numbers.reshape(rows, -1))
    # With two-level scales the last block of a row may have groups beyond its columns.
    value *= scale[:, : value.shape[1], None]
    if minimum is not None:
        value += minimum[:, : value.shape[1], None]
    return value.reshape(rows, -1)[:, :columns]


def code_values(blocks: Blocks, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns the float32 numbers that codes stand for, before scales are applied. codes: the bytes of codes
    whose zero point is subtracted already, uint8 of any shape."""
    values: NDArray[np.float32]
    if blocks.floats is not None:
        values = _float_values(blocks.floats)[codes]
    elif blocks.table is not None:
        values = np.array(blocks.table, np.float32)[codes]
    else:
        values = codes.view(np.int8 if blocks.signed else np.uint8).astype(np.float32)
    return values


@cache
def _float_values(kind: FloatCode) -> NDArray[np.float32]:
    """Returns code of an 8-bit float -> its value, float32 [256]; codes that are not finite have no defined
    values. As a float16 the bits of such a float are the number times a power of two."""
    codes = np.arange(256)
    bits = (codes & 128) << 8 | (codes & 127) << (10 - kind.fraction_bits)
    halves = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float32] = halves * np.float32(2.0 ** (15 - kind.bias))
    return values


def _scales(blocks: Blocks, numbers: Array) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Returns (scales, minima) of a matrix that is stored row by row, each float32 [rows, groups], with
    two-level scales for the groups of whole blocks of 256 columns, padding included. minima is None if the
    format has none. numbers: the stored tensor q_scale."""
    if blocks.scale != "levels":
        if not blocks.minimum:
            return numbers.astype(np.float32), None
        scale, minimum = (_halves(numbers, upper) for upper in (False, True))
        return scale, minimum
    rows, steps = len(numbers), BLOCK_WEIGHTS // blocks.group
    by_block = numbers.reshape(rows, -1, 1 + steps // 4 * (1 + blocks.minimum))
    wide = []
    for index, dtype in enumerate((np.int8, np.uint8)[: 1 + blocks.minimum]):
        words = np.ascontiguousarray(by_block[:, :, 1 + index * steps // 4 : 1 + (index + 1) * steps // 4])
        block = _halves(by_block[:, :, :1], bool(index))
        levels = words.view(dtype).reshape(rows, -1, steps).astype(np.float32)
        wide.append((levels * block).reshape(rows, -1))
    return wide[0], wide[1] if blocks.minimum else None


def _halves(words: NDArray[Any], upper: bool) -> NDArray[np.float32]:
    """Returns the low or, if `upper`, the high float16 in each uint32 word, converted to float32 in the same
    shape."""
    half: NDArray[np.uint16] = (words >> np.uint32(16 * upper) & np.uint32(0xFFFF)).astype(np.uint16)
    return half.view(np.float16).astype(np.float32)
