"""Converts floating point weights to float32, or rounds them to a stored dtype; overflow and NaN raise
CheckpointError."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlcbuild.errors import CheckpointError

Array: TypeAlias = NDArray[np.float32 | np.float16 | np.uint32 | np.uint16 | np.uint8]
"""An array of weights or codes, as checkpoints and weights files store them. uint16 holds the bits of
bfloat16."""

OVERFLOW = 65520.0
"""The smallest positive number that float16 rounds to infinity."""
BLOCK = 1 << 17
"""Number of weights that are packed at once. Their float32 copy and scratch arrays take about 1 MB, which
stays in a core's cache, and the cost of each NumPy call is spread over many weights."""


class Scratch:
    """Scratch arrays for packing weights in one thread, allocated once and reused from one matrix to the
    next."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[np.uint8]] = {}
        self._views: dict[tuple[str, tuple[int, ...], DTypeLike], NDArray[Any]] = {}
        """(purpose, shape, dtype) -> array. Arrays are cached because each block of weights needs seven, and
        creating them anew would take 2% of the packing time."""

    def array(self, use: str, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an uninitialised array of this shape and dtype. use: name of its purpose; the array is
        valid until the next call with the same name, which reuses its memory."""
        form = use, tuple(shape), dtype
        view = self._views.get(form)
        if view is None:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if use not in self._memory or self._memory[use].size < size:
                self._memory[use] = np.empty(size, np.uint8)
                self._views = {other: array for other, array in self._views.items() if other[0] != use}
            view = self._views[form] = self._memory[use][:size].view(dtype).reshape(shape)
        return view


def widen(raw: Array, out: NDArray[np.float32]) -> None:
    """Converts each element of `raw` to float32, exactly, and writes it into `out`.

    raw: float32, float16, or bfloat16 bits in uint16, shaped like out.
    """
    if raw.dtype == np.uint16:
        bits = out.view(np.uint32)
        np.copyto(bits, raw)
        np.left_shift(bits, 16, out=bits)
    elif raw.dtype == np.float16:
        _widen_half(raw, out)
    else:
        np.copyto(out, raw)


def widened(raw: Array) -> NDArray[np.float32]:
    """Returns a new float32 array with the exact values of `raw`, which is float32, float16, or bfloat16 bits
    in uint16.
    """
    out = np.empty(raw.shape, np.float32)
    widen(raw, out)
    return out


def _widen_half(raw: Array, out: NDArray[np.float32]) -> None:
    """Converts the numbers `raw`, of dtype float16, to float32, exactly, and writes them into `out`. It
    shifts integers, because NumPy's own cast is three times slower on x86.

    The sign moves to bit 31, exponent and fraction to bits 13 and up; a product with 2**112 then corrects the
    exponent's bias, subnormals included. Infinities and NaN become numbers of magnitude 2**16 and above; if
    there are any, NumPy's cast converts the array again.
    """
    bits = out.view(np.uint32)
    np.copyto(bits, raw.view(np.int16), casting="unsafe")
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, 0x8FFFE000, out=bits)
    np.multiply(out, np.float32(2.0**112), out=out)
    if out.size and (out.max() >= 2.0**16 or out.min() <= -(2.0**16)):
        np.copyto(out, raw)


def narrow(raw: Array, dtype: DTypeLike, scratch: Scratch, name: str) -> Array:
    """Returns `raw` rounded to `dtype`, float32 or float16, in scratch memory that the next call overwrites,
    or `raw` itself if it has that dtype. raw: float32, float16, or bfloat16 bits in uint16.

    Raises CheckpointError, with `name` in its message, if an element is infinite or NaN, or if `dtype` is
    float16 and its magnitude is 65520 or more.
    """
    same = raw.dtype == np.dtype(dtype)
    out = raw if same else scratch.array("narrowed", raw.shape, dtype)
    source, target = raw.reshape(-1), out.reshape(-1)
    wide = scratch.array("widened", (min(BLOCK, source.size),), np.float32)
    for start in range(0, source.size, BLOCK):
        part = source[start : start + BLOCK]
        if not same:
            widen(part, wide[: part.size])
            part = wide[: part.size]
        greatest = largest(part)
        if not math.isfinite(greatest):
            raise not_finite(name)
        if target.dtype == np.float16 and greatest >= OVERFLOW:
            raise overflow(name, greatest, "")
        if not same:
            np.copyto(target[start : start + BLOCK], part, casting="unsafe")
    return out


def largest(part: Array) -> float:
    """Returns the largest magnitude of an array's elements; it is infinite or NaN if any element is. part:
    float32 or float16, not empty."""
    if part.dtype == np.float16:
        # Without their sign, floating point numbers are ordered as their bits.
        return float((part.view(np.uint16) & 0x7FFF).max().view(np.float16))
    return float(np.maximum(part.max(), -part.min()))


def not_finite(name: str) -> CheckpointError:
    """Returns the CheckpointError for a tensor called `name` with infinite or NaN elements; the caller raises
    it.
    """
    return CheckpointError(
        f"{name}: it holds infinite or NaN weights, which no format can store; repair the checkpoint"
    )


def overflow(name: str, greatest: float, subject: str) -> CheckpointError:
    """Returns the CheckpointError for a tensor called `name` whose number `greatest` exceeds the range of
    float16; the caller raises it. subject: text before the number in the message, or ""."""
    return CheckpointError(
        f"{name}: it holds {subject}{greatest:.6g}, beyond the largest float16, 65504; store this parameter "
        "in float32: use a scheme such as q0f32 or q4f32_1, or an override for it"
    )
