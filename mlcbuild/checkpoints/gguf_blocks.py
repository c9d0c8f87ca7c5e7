"""Dequantization of GGUF tensor types to float32.

A quantized row is a sequence of blocks. Each block holds integer codes, packed into bytes, and the scales
that turn codes into weights. The table lists the fields of a block in the order of their bytes.

| type | fields of a block | weight | weights per scale |
|---|---|---|---|
| Q4_0 | d f16, low 16 | d (q - 8) | 32 |
| Q4_1 | d f16, m f16, low 16 | d q + m | 32 |
| Q5_0 | d f16, high 4, low 16 | d (q - 16) | 32 |
| Q5_1 | d f16, m f16, high 4, low 16 | d q + m | 32 |
| Q8_0 | d f16, q 32 (signed) | d q | 32 |
| Q2_K | s 16 (4 bits of scale, 4 of minimum), low 64, d f16, m f16 | (d scale) q - m minimum | 16 |
| Q3_K | high 32, low 64, s 12 (6 bits each), d f16 | (d (s - 32)) (q - 4) | 16 |
| Q4_K | d f16, m f16, s 12 (6 bits of scale, 6 of minimum), low 128 | (d scale) q - m minimum | 32 |
| Q5_K | d f16, m f16, s 12 as in Q4_K, high 32, low 128 | (d scale) q - m minimum | 32 |
| Q6_K | low 128, high 64, s 16 (signed), d f16 | (d s) (q - 32) | 16 |
| IQ4_NL | d f16, low 16 | d NONLINEAR[q] | 32 |
| IQ4_XS | d f16, high bits of s 2, low bits of s 4, low 128 | (d (s - 32)) NONLINEAR[q] | 32 |
| MXFP4 | e 1, low 16 | 2^(e - 128) TWICE_E2M1[q] | 32 |
| TQ1_0 | low 52 (base 3), d f16 | d (q - 1) | 256 |
| TQ2_0 | low 64, d f16 | d (q - 1) | 256 |
| NVFP4 | e 4, low 32 (8 for each scale) | (e as E4M3 / 2) TWICE_E2M1[q] | 16 |
| Q1_0 | d f16, low 16 | d (2 q - 1) | 128 |
| Q2_0 | d f16, low 16 | d (q - 1) | 64 |

`low 16` is 16 bytes of the low bits of the codes `q`, and `high` holds the bits above those; `s` holds
integer factors of groups; f16 is a float16. Codes are packed in runs of bytes: the lowest bits of each byte
of a run come first, then the next higher bits of each byte, and so on (`high 4`: all bits of a byte, then of
the next; Q1_0 and Q2_0 the same). Numbers are little-endian. A weight is computed in float32 and rounded
after each operation; products in parentheses, and those with a minimum, come first. The types whose weights
are codebooks (IQ1, IQ2, IQ3) are decoded by ggml's package gguf, which holds their codebooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlcbuild.checkpoints.gguf_types import TYPES, BlockType
from mlcbuild.quant.blocks import NONLINEAR, TWICE_E2M1, BlockRows
from mlcbuild.quant.floats import widen

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]


class _Decoded(NamedTuple):
    """The unpacked fields of consecutive quantized blocks of a GGUF tensor. A block has one scale, one
    minimum, and groups of weights with an integer factor for each of the two.

    A weight is codes * (scale * steps) + minimum * minimum_steps, each operation in float32.
    """

    codes: Bytes
    """The integer codes of the weights, uint8 [blocks, weights of a block], whose bits are those of int8."""
    scale: Floats
    """The scale of each quantized block as float32, [blocks, 1], or of each quarter of it, [blocks, 4]."""
    steps: NDArray[np.int8] | None = None
    """The integer factor of each group's scale, [blocks, groups of a block]; None: all factors are 1."""
    minimum: Floats | None = None
    """The minimum of each block as float32, [blocks, 1]. It is added to each weight, times its group's factor
    in types with `minimum_steps`; None: nothing is added."""
    minimum_steps: Bytes | None = None
    """The integer factor of each group's minimum, [blocks, groups of a block]; None: all factors are 1, or
    there is no minimum."""


CHUNK = 1 << 17
"""Number of GGUF weights that are decoded at once. Their float32 values and codes take about 1 MB, which
stays in a core's cache. On a Xeon, decoding K types took up to a fifth longer with half this number.
"""

_NONLINEAR, _TWICE_E2M1 = np.array(NONLINEAR, np.int8), np.array(TWICE_E2M1, np.int8)
HALF_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Byte of an 8-bit scale (E8M0 of the OCP Microscaling specification 1.0) -> half of its value, for codes of
TWICE_E2M1. The first two values are subnormal, and byte 255 is not treated as NaN.
"""


def _half_ue4m3(byte: int) -> float:
    """Returns half of the number that a byte stands for as a scale of NVFP4: an 8-bit float (E4M3) whose sign
    is ignored. As in ggml, byte 127 (NaN) stands for 0, and byte 255 for 480."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte == 127:
        return 0.0
    return math.ldexp(fraction, -10) if exponent == 0 else math.ldexp(8 + fraction, exponent - 11)


HALF_UE4M3 = np.array([_half_ue4m3(byte) for byte in range(256)], np.float32)
"""Byte of a scale of NVFP4 -> half of its value, for codes of TWICE_E2M1."""


def dequantize(raw: Bytes, kind: BlockType, out: Floats) -> None:
    """Writes the float32 weights of whole rows of a GGUF tensor to `out`, with the same bits as the gguf
    package of ggml computes.

    raw: uint8 [rows, bytes of a row]; kind: a value of TYPES; out: float32 [rows, weights of a row],
    contiguous. Infinite and NaN scales give infinite and NaN weights. Threads may call it at the same time.
    Raises ValueError for another type, and when the arrays do not fit the type or each other.
    """
    _check(raw, kind, out)
    blocks = raw.reshape(-1, kind.size)
    weights = out.reshape(-1, kind.weights)
    step = CHUNK // kind.weights
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            place = weights[start : start + step]
            if kind.name in _DECODERS:
                _scale(_DECODERS[kind.name](part), place)
            elif kind.name in _NUMBERS:
                _convert(part.view(_NUMBERS[kind.name]), place)
            else:
                np.copyto(place, _from_codebook(part, kind))


def unpack(raw: Bytes, kind: BlockType) -> BlockRows:
    """Unpacks whole rows, uint8 [rows, bytes of a row], of a quantized GGUF type, and returns a BlockRows:
    integer codes [rows, columns], for blocks of columns float32 scales and the type's minima, if any, and for
    groups of columns the integers by which types ending in _K and IQ4_XS multiply these.

    Raises ValueError for a type of plain numbers or with a codebook.
    """
    if kind.name not in _DECODERS:
        raise ValueError(f"{kind.name} has no integer codes with scales; read it with dequantize()")
    decoded = _DECODERS[kind.name](np.ascontiguousarray(raw).reshape(-1, kind.size))
    fields: list[Any] = [None if field is None else field.reshape(len(raw), -1) for field in decoded]
    return BlockRows(*fields)


def _check(raw: Bytes, kind: BlockType, out: Floats) -> None:
    if TYPES.get(kind.number) != kind:
        raise ValueError(f"{kind} is not in gguf_types.TYPES; pass one of its values")
    if raw.ndim != 2 or raw.dtype != np.uint8:
        raise ValueError(f"{kind.name}: raw needs two axes of uint8, got shape {raw.shape} of {raw.dtype}")
    rows, size = raw.shape
    if size % kind.size:
        raise ValueError(f"{kind.name}: a row needs whole blocks of {kind.size} bytes, got {size} bytes")
    expected = (rows, size // kind.size * kind.weights)
    if out.shape != expected or out.dtype != np.float32 or not out.flags.c_contiguous:
        layout = "contiguous" if out.flags.c_contiguous else "strided"
        raise ValueError(
            f"{kind.name}: out needs shape {expected} of contiguous float32, "
            f"got shape {out.shape} of {layout} {out.dtype}"
        )


def _convert(numbers: NDArray[Any], out: Floats) -> None:
    if numbers.dtype in (np.float16, np.uint16):
        widen(numbers, out)
    else:
        np.copyto(out, numbers, casting="same_kind")


def _from_codebook(blocks: Bytes, kind: BlockType) -> Floats:
    """Returns the float32 weights of blocks of a type whose values are a codebook, as the package gguf
    decodes them."""
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(blocks, GGMLQuantizationType(kind.number))


def _scale(decoded: _Decoded, out: Floats) -> None:
    codes, scale, steps, minimum, minimum_steps = decoded
    scale = scale if steps is None else scale * steps
    # A separate cast runs over the whole chunk at once. Casting inside the product would run over the few
    # weights of one scale at a time.
    np.copyto(out, codes.view(np.int8))
    groups = out.reshape(*scale.shape, -1)
    groups *= scale[:, :, None]
    if minimum is not None:
        offset = minimum if minimum_steps is None else minimum * minimum_steps
        groups += offset[:, :, None]


def _field(blocks: Bytes, start: int, *shape: int) -> Bytes:
    """Returns a contiguous copy, uint8 [blocks, *shape], of the bytes from byte `start` on of each quantized
    block.
    """
    size = math.prod(shape)
    return _runs(blocks[:, start : start + size]).copy().view(np.uint8).reshape(-1, *shape)


def _runs(array: Bytes) -> NDArray[np.void]:
    """Returns a view [..., 1] of a byte array [..., n], in which all n bytes along the last axis are one
    element.

    NumPy copies 16 bytes about six times faster as one element.
    """
    return array.view(f"V{array.shape[-1]}")


def _half(blocks: Bytes, start: int) -> Floats:
    """Returns the float16 number that begins at byte `start` of each block, converted to float32, [blocks,
    1].
    """
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _split(packed: Bytes, bits: int) -> Bytes:
    """Splits bytes into codes of `bits` bits (1, 2 or 4): uint8 [..., bytes] -> uint8 [..., 8 / bits, bytes].
    Index 0 of the new axis has the lowest bits of each byte, the next index the next higher bits.
    """
    codes = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for index in range(8 // bits):
        shifted = np.right_shift(packed, index * bits, dtype=np.uint8)
        _runs(codes)[..., index, :] = _runs(shifted & np.uint8((1 << bits) - 1))
    return codes


def _codes(blocks: Bytes, start: int, count: int, run: int, bits: int) -> Bytes:
    """Returns codes of `bits` bits, uint8 [blocks, weights], unpacked from `count` sequences of `run` bytes,
    which begin at byte `start` of each block. The codes of a sequence are the lowest bits of all of its
    bytes, then the next higher bits of all, and so on.
    """
    return _split(_field(blocks, start, count, run), bits).reshape(len(blocks), -1)


def _join(low: Bytes, high: Bytes, bits: int) -> Bytes:
    """Returns codes joined from their lowest `bits` bits in `low` and their other bits in `high`. All arrays
    are uint8 of the same shape.
    """
    return np.left_shift(high, bits, dtype=np.uint8) | low


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Returns the 32 bits that begin at byte `start` of each block, [blocks, 32], the lowest bit of each byte
    first.
    """
    return np.unpackbits(_field(blocks, start, 4), axis=-1, bitorder="little")


def _q4_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 2, 1, 16, 4) - 8, _half(blocks, 0))


def _q4_1(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 4, 1, 16, 4), _half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Decoded:
    codes = _join(_codes(blocks, 6, 1, 16, 4), _fifth_bits(blocks, 2), 4)
    return _Decoded(codes - 16, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Decoded:
    codes = _join(_codes(blocks, 8, 1, 16, 4), _fifth_bits(blocks, 4), 4)
    return _Decoded(codes, _half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_field(blocks, 2, 32), _half(blocks, 0))


def _q2_k(blocks: Bytes) -> _Decoded:
    scales = _field(blocks, 0, 16)
    steps, minimum_steps = (scales & 15).view(np.int8), np.right_shift(scales, 4, dtype=np.uint8)
    codes = _codes(blocks, 16, 2, 32, 2)
    return _Decoded(codes, _half(blocks, 80), steps, -_half(blocks, 82), minimum_steps)


def _q3_k(blocks: Bytes) -> _Decoded:
    codes = _join(_codes(blocks, 32, 2, 32, 2), _codes(blocks, 0, 1, 32, 1), 2)
    scales = _join(_codes(blocks, 96, 1, 8, 4), _codes(blocks, 104, 1, 4, 2), 4)
    return _Decoded(codes - 4, _half(blocks, 108), (scales - 32).view(np.int8))


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, NDArray[np.int8], Floats, Bytes]:
    """Returns (scales [blocks, 1], integer factors of scales [blocks, 8], minima and integer factors of
    minima in the same shapes) for the eight groups of each Q4_K or Q5_K block. The minima are negated, since
    a `_Decoded` adds them.

    The factors take 12 bytes from byte 4 of the block. The low six bits of the first four are the factors of
    the scales of groups 0 to 3, those of the next four of the minima. The last four hold the low four bits
    for groups 4 to 7, scales in the lower half of a byte and minima in the upper; their high two bits are the
    high bits of the first four bytes (scales) and of the next four (minima).
    """
    fields = _field(blocks, 4, 3, 4)
    first, last = fields[:, :2], fields[:, 2]
    later = _join(np.stack([last & 15, last >> 4], axis=1), first >> np.uint8(6), 4)
    six_bits = np.concatenate([first & 63, later], axis=2)
    steps: NDArray[np.int8] = six_bits[:, 0].view(np.int8)
    return _half(blocks, 0), steps, -_half(blocks, 2), six_bits[:, 1]


def _q4_k(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 16, 4, 32, 4), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> _Decoded:
    codes = _join(_codes(blocks, 48, 4, 32, 4), _codes(blocks, 16, 1, 32, 1), 4)
    return _Decoded(codes, *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> _Decoded:
    codes = _join(_codes(blocks, 0, 2, 64, 4), _codes(blocks, 128, 2, 32, 2), 4)
    return _Decoded(codes - 32, _half(blocks, 208), _field(blocks, 192, 16).view(np.int8))


def _iq4_nl(blocks: Bytes) -> _Decoded:
    return _Decoded(_NONLINEAR.take(_codes(blocks, 2, 1, 16, 4)).view(np.uint8), _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> _Decoded:
    scales = _join(_codes(blocks, 4, 4, 1, 4), _codes(blocks, 2, 2, 1, 2), 4)
    codes = _NONLINEAR.take(_codes(blocks, 8, 8, 16, 4)).view(np.uint8)
    return _Decoded(codes, _half(blocks, 0), (scales - 32).view(np.int8))


def _mxfp4(blocks: Bytes) -> _Decoded:
    codes = _TWICE_E2M1.take(_codes(blocks, 1, 1, 16, 4)).view(np.uint8)
    return _Decoded(codes, HALF_E8M0[blocks[:, :1]])


def _ternary_digits(packed: Bytes, count: int) -> Bytes:
    """Returns the first `count` base-3 digits, most significant first, of fractions stored in bytes: [blocks,
    bytes] -> [blocks, count * bytes], the first digit of every byte, then the second of every byte, and so
    on.

    A byte b encodes b / 256, which is at or just above a fraction of five base-3 digits.
    """
    digits = np.empty((len(packed), count, packed.shape[1]), np.uint8)
    for index in range(count):
        rest = packed * np.uint8(3**index)
        digits[:, index] = (rest >= 86).view(np.uint8) + (rest >= 171)
    return digits.reshape(len(packed), -1)


def _tq1_0(blocks: Bytes) -> _Decoded:
    runs = (_field(blocks, 0, 32), 5), (_field(blocks, 32, 16), 5), (_field(blocks, 48, 4), 4)
    codes = np.concatenate([_ternary_digits(packed, count) for packed, count in runs], axis=1)
    return _Decoded(codes - 1, _half(blocks, 52))


def _tq2_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 0, 2, 32, 2) - 1, _half(blocks, 64))


def _nvfp4(blocks: Bytes) -> _Decoded:
    codes = _TWICE_E2M1.take(_codes(blocks, 4, 4, 8, 4)).view(np.uint8)
    return _Decoded(codes, HALF_UE4M3[blocks[:, :4]])


def _q1_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 2, 16, 1, 1) * np.uint8(2) - 1, _half(blocks, 0))


def _q2_0(blocks: Bytes) -> _Decoded:
    return _Decoded(_codes(blocks, 2, 16, 1, 2) - 1, _half(blocks, 0))


_NUMBERS: Mapping[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F64": np.float64,
    "BF16": np.uint16,
}
"""Name of a GGUF tensor type of plain numbers -> NumPy dtype of one number; uint16 holds the bits of
bfloat16."""
_DECODERS: Mapping[str, Callable[[Bytes], _Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
}
"""Name of a quantized GGUF tensor type -> function that unpacks blocks, uint8 [blocks, bytes of a block], and
returns their fields as a `_Decoded`. Types of CODEBOOKS have none.
"""
