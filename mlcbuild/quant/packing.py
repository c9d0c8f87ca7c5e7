"""The definition of every format, pack() and unpack(), in blocks that stay in a core's cache.

A block of rows is rearranged so that consecutive groups lie side by side and the eight quads (four
consecutive weights) of a group lie in eight planes. Every step is then one NumPy call over long contiguous
rows, in memory that is reused, and the scales of a whole plane are one broadcast row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlcbuild.errors import CheckpointError
from mlcbuild.quant.scheme import Scheme

Array: TypeAlias = NDArray[np.float32 | np.float16 | np.uint32 | np.uint16 | np.uint8]
"""A tensor of a checkpoint or of a weights file. uint16 holds the bits of bfloat16."""

GROUP = 32
TILE = 16
QUAD = 4
PLANES = GROUP // QUAD


@dataclass(frozen=True)
class Search:
    """How the scale of a group is searched for: see pack()."""

    unit: int
    """What the extreme is counted as: small enough for sums of eight products with a code in int16, where
    NumPy handles twice as many numbers at once as in float32."""
    widths: tuple[int, ...]
    """Of a step, in each of the starts. The first two divide the unit into `top` steps and one less, so that
    weights on such grids are met exactly."""
    top: int
    """Codes are 1 - top .. top, the extreme being positive."""


SEARCHES = {4: Search(504, (63, 72, 59), 8), 5: Search(240, (15, 16), 16)}
"""By bits; 8 bits leave too little to be gained."""
TINY = np.float32(2.0**-96)
"""A group below this is taken for zeros where a scale is fitted: its inverse could overflow."""
OVERFLOW = 65520.0
"""The smallest number that rounds to an infinite float16."""
BLOCK = 1 << 17
"""Weights in a block: its float32 copy and scratch take a megabyte, so that one call's cost is spread."""


def widen(raw: Array, out: NDArray[np.float32]) -> None:
    """float32 of each element, exact. raw: float32, float16, or bfloat16 bits in uint16, shaped like out."""
    if raw.dtype == np.uint16:
        bits = out.view(np.uint32)
        np.copyto(bits, raw)
        np.left_shift(bits, 16, out=bits)
    elif raw.dtype == np.float16:
        _widen_half(raw, out)
    else:
        np.copyto(out, raw)


def _widen_half(raw: Array, out: NDArray[np.float32]) -> None:
    """float16 by integer steps: NumPy's own cast is three times slower on x86.

    The sign moves to bit 31, exponent and fraction to bits 13 and up; a product with 2**112 then corrects
    the exponent's bias, subnormals included. Only infinities and NaN come out wrong, at 2**16 and above.
    """
    bits = out.view(np.uint32)
    np.copyto(bits, raw.view(np.int16), casting="unsafe")
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, 0x8FFFE000, out=bits)
    np.multiply(out, np.float32(2.0**112), out=out)
    if out.size and (out.max() >= 2.0**16 or out.min() <= -(2.0**16)):
        np.copyto(out, raw)


def narrow(raw: Array, out: Array, name: str) -> Array:
    """A contiguous tensor, rounded to the dtype of `out` (float32 or float16).

    Returns `raw` itself when it has that dtype, else `out`, filled. Raises CheckpointError, naming `name`,
    when an element is infinite or NaN, or too large for float16.
    """
    source, target = raw.reshape(-1), out.reshape(-1)
    scratch = np.empty(min(BLOCK, source.size), np.float32)
    for start in range(0, source.size, BLOCK):
        part = source[start : start + BLOCK]
        if part.dtype != target.dtype:
            wide = scratch[: part.size]
            widen(part, wide)
            part = wide
        largest = _largest(part)
        if not math.isfinite(largest):
            raise _not_finite(name)
        if target.dtype == np.float16 and largest >= OVERFLOW:
            raise _overflow(name, largest, "")
        if source.dtype != target.dtype:
            np.copyto(target[start : start + BLOCK], part, casting="unsafe")
    return raw if source.dtype == target.dtype else out


def _largest(part: Array) -> float:
    """The largest magnitude; not finite when any element is not."""
    if part.dtype == np.float16:
        # Without their sign, floating point numbers are ordered as their bits.
        return float((part.view(np.uint16) & 0x7FFF).max().view(np.float16))
    return float(np.maximum(part.max(), -part.min()))


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: it holds infinite or NaN weights, which no format can store; repair the checkpoint"
    )


def _overflow(name: str, largest: float, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: it holds {what}{largest:.6g}, beyond the largest float16, 65504; store this parameter in "
        "float32: use a scheme such as q0f32 or q4f32_1, or an override for it"
    )


def pack(weight: Array, scheme: Scheme, name: str = "matrix") -> tuple[Array, Array]:
    """(q_weight, q_scale) of a float matrix [N, K], with the shapes and dtypes that stored() states.

    weight: float32, float16, or bfloat16 as its bits in uint16. K is padded with zeros to whole groups, and
    the rows of x16 to whole tiles. Arithmetic is float32, each step rounded to nearest even:

        q = clip(rint(w / scale + zero), 0, top), scale being rounded to the scheme's dtype first, with

        row, 4 bits    scale = fit(w), zero = 7, top = 15
        row, 8 bits    scale = max|w| / 127, zero = 127, top = 254
        x16, 4 bits    scale = -fit(w), zero = 8, top = 15
        x16, 5 bits    scale = -fit(w), zero = 16, top = 31
        x16, 8 bits    scale = extreme / -128, zero = 128, top = 255

    extreme is the weight of largest magnitude with its sign, the positive one of two equal ones. fit(w) is
    the scale of least squared error, as far as one step of Lloyd's method (1982) from three starts finds it:
    u = rint(w * (504 / extreme)); for steps of 63, 72 and 59 c = clip(floor(u / step + 1/2), -7, 8) and
    a = sum(u * c) / sum(c * c); the first c with the largest a * sum(u * c) gives fit = extreme * (a / 504).
    Sums are of whole numbers below 2**24, exact in any order. A group that was dequantized from 4 bits with
    its extreme at -8 or 7 steps is met exactly (scales in float16), and the squared error on gaussian weights
    is 10% below that of extreme / -8, and 30% below that of max|w| / 7. For 5 bits it is the same with 240
    for 504, steps of 15 and 16, and codes -15 .. 16; the error is 8% below that of extreme / -16, a quarter
    of that of 4 bits.

    A scale that rounds to zero is stored as 2**-24, the smallest float16, in x16, whose kernels multiply
    scales by adding to their exponents; in row it is zero, and its group stored as zeros: all its weights are
    below 2**-21 for float16.
    What the schemes named as mlc-llm's store means there what it means here: layout, and (q - zero) * scale.
    q8f32_1 even has the same bytes where K is a multiple of 32; with 4 bits mlc-llm takes max|w| / 7 and
    leaves the sixteenth level unused.

    Raises CheckpointError, naming `name`, when a weight is infinite or NaN or a scale overflows float16.
    """
    rows, columns = weight.shape
    if weight.dtype not in (np.float32, np.float16, np.uint16):
        raise TypeError(f"cannot pack {weight.dtype}: give float32, float16, or bfloat16 bits in uint16")
    packer = Packer(scheme, columns)
    q_weight, q_scale = packer.empty(rows)
    packer.pack(weight, q_weight, q_scale, name)
    return q_weight, q_scale


class Packer:
    """Packs rows of matrices with one number of columns. It holds scratch memory: one for each thread."""

    def __init__(self, scheme: Scheme, columns: int) -> None:
        if scheme.bits == 0:
            raise ValueError(f"{scheme.name} does not quantize: there is nothing to pack")
        self._scheme = scheme
        self._name = ""
        self._columns = columns
        self._groups = -(-columns // GROUP)
        self.step = TILE if scheme.layout == "x16" else 1
        """Rows that are packed together: blocks start at multiples of it."""
        rows = max(1, BLOCK // (self._groups * GROUP) // self.step) * self.step
        self._rows = rows
        self._float = np.empty(rows * self._groups * GROUP, np.float32)
        self._scratch = np.empty_like(self._float)
        self._units = np.empty(self._float.size, np.int16)
        self._codes = np.empty_like(self._units)
        self._search = SEARCHES.get(scheme.bits)
        starts = len(self._search.widths) if self._search else 0
        self._sums = np.empty(2 * starts * self._float.size // PLANES, np.int16)

    def empty(self, rows: int) -> tuple[Array, Array]:
        """Uninitialised (q_weight, q_scale) for a number of rows."""
        scheme, tiles = self._scheme, -(-rows // self.step)
        if scheme.layout == "x16":
            return (
                np.empty((tiles, self._groups, GROUP * TILE * scheme.bits // 8), np.uint8),
                np.empty((tiles, self._groups, TILE), np.float16),
            )
        words = self._groups * scheme.bits
        return np.empty((rows, words), np.uint32), np.empty((rows, self._groups), scheme.dtype)

    def pack(self, weight: Array, q_weight: Array, q_scale: Array, name: str) -> None:
        """Packs weight [rows, K] into arrays as empty(rows) makes them. See pack()."""
        self._name = name
        rows = weight.shape[0]
        for start in range(0, rows, self._rows):
            stop = min(start + self._rows, rows)
            block = self._padded(weight[start:stop])
            first, last = start // self.step, -(-stop // self.step)
            if self._scheme.layout == "x16":
                self._tiles(block, q_weight[first:last], q_scale[first:last])
            else:
                self._lines(block, q_weight[first:last], q_scale[first:last])

    def _padded(self, block: Array) -> Array:
        """Contiguous, with zeros up to whole groups and whole tiles."""
        rows, columns = -(-block.shape[0] // self.step) * self.step, self._groups * GROUP
        if block.shape == (rows, columns):
            return np.ascontiguousarray(block)
        padded = np.zeros((rows, columns), block.dtype)
        padded[: block.shape[0], : self._columns] = block
        return padded

    def _planes(self, block: Array, shape: tuple[int, ...], order: tuple[int, ...]) -> NDArray[np.float32]:
        """float32 [PLANES, groups * QUAD]: the block's quads, seen as `shape`, transposed to `order`."""
        quad = np.dtype(np.complex128 if block.itemsize == 4 else np.uint64)
        quads = block.view(quad).reshape(shape).transpose(order)
        out = self._float[: block.size].reshape(PLANES, -1)
        if block.itemsize == 4:
            np.copyto(out.view(quad).reshape(quads.shape), quads)
            return out
        moved = self._scratch.view(quad)[: quads.size]
        np.copyto(moved.reshape(quads.shape), quads)
        widen(moved.view(block.dtype).reshape(out.shape), out)
        return out

    def _lines(self, block: Array, q_weight: Array, q_scale: Array) -> None:
        """Layout row: eight (4 bits) or four (8 bits) consecutive weights of a row in a uint32."""
        bits, groups = self._scheme.bits, q_scale.size
        planes = self._planes(block, (groups, PLANES), (1, 0))
        zero = 2 ** (bits - 1) - 1
        extreme = self._extreme(planes)
        wide = self._fit(planes, extreme) if bits == 4 else np.divide(np.abs(extreme), zero, dtype=np.float32)
        scale = self._narrowed(wide)
        q_scale[...] = scale.reshape(q_scale.shape)
        q = self._quantize(planes, scale, zero, 15 if bits == 4 else 2 * zero)
        if bits == 8:
            q_weight.reshape(groups, PLANES)[...] = q.view(np.uint32).T
            return
        # Two bytes b0, b1 become b0 | b1 << 4: in a little-endian uint16 that is the low byte of x | x >> 4.
        pairs = q.view(np.uint16)
        spare = self._scratch.view(np.uint16)[pairs.size : 2 * pairs.size].reshape(pairs.shape)
        np.right_shift(pairs, 4, out=spare)
        np.bitwise_or(pairs, spare, out=spare)
        q_weight.view(np.uint16).reshape(groups, PLANES)[...] = spare.astype(np.uint8).view(np.uint16).T

    def _tiles(self, block: Array, q_weight: Array, q_scale: Array) -> None:
        """Layout x16: per tile and group there are bytes [quad][row of the tile][weight of the quad]; with 4
        bits only for the quads of weights 0..15, and weights 16..31 are in the high halves of those bytes.
        With 5 bits the fifth ones come after that: bytes [row][weight of a quad], a bit for each quad."""
        tiles, groups, _ = q_scale.shape
        bits, zero = self._scheme.bits, 2 ** (self._scheme.bits - 1)
        planes = self._planes(block, (tiles, TILE, groups, PLANES), (3, 0, 2, 1))
        extreme = self._extreme(planes)
        wide = -self._fit(planes, extreme) if self._search else np.divide(extreme, -zero, dtype=np.float32)
        scale = self._narrowed(wide)
        q_scale[...] = scale.reshape(q_scale.shape)
        q = self._quantize(planes, scale, zero, 2 * zero - 1).view(np.uint64)
        if bits < 8:
            q = _merged(q, bits)
        words = q.view(np.uint32).reshape(len(q), tiles, groups, TILE)
        q_weight.view(np.uint32).reshape(tiles, groups, len(q), TILE)[...] = words.transpose(1, 2, 0, 3)

    def _extreme(self, planes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of each group the weight of largest magnitude: [groups]."""
        high, low = _over_groups(np.maximum, planes), _over_groups(np.minimum, planes)
        extreme = np.where(high >= -low, high, low)
        if not math.isfinite(_largest(extreme)):
            raise _not_finite(self._name)
        return extreme

    def _fit(self, planes: NDArray[np.float32], extreme: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scale for codes 1 - top .. top, of either sign: see pack()."""
        search = self._search
        assert search is not None
        units, codes, wide = (
            memory[: planes.size].reshape(planes.shape)
            for memory in (self._units, self._codes, self._scratch)
        )
        np.multiply(planes, np.repeat(_inverse(extreme, search.unit), QUAD), out=wide)
        np.rint(wide, out=wide)
        np.copyto(units, wide, casting="unsafe")
        starts = len(search.widths)
        quads = self._sums[: 2 * starts * planes.shape[1]].reshape(2, starts, -1)
        for width, along, size in zip(search.widths, *quads, strict=True):
            np.add(units, np.int16(width // 2), out=codes)
            np.floor_divide(codes, np.int16(width), out=codes)
            if width * search.top <= search.unit:  # wider steps reach no further than codes do
                np.clip(codes, np.int16(1 - search.top), np.int16(search.top), out=codes)
            np.einsum("pq,pq->q", units, codes, out=along)
            np.einsum("pq,pq->q", codes, codes, out=size)
        along, size = _of_quads(quads)
        fitted = along / np.maximum(size, np.float32(1))
        good = fitted * along
        found, best = fitted[0], good[0]
        for a, reached in zip(fitted[1:], good[1:], strict=True):
            found, best = np.where(reached > best, a, found), np.maximum(reached, best)
        scale: NDArray[np.float32] = extreme * (found / np.float32(search.unit))
        return scale

    def _narrowed(self, wide: NDArray[np.float32]) -> Array:
        """Scales in the scheme's dtype, never -0, and not 0 either in x16."""
        largest = _largest(wide)
        if self._scheme.dtype == "float16" and largest >= OVERFLOW:
            raise _overflow(self._name, largest, "weights that need a scale of ")
        scale: Array = wide.astype(self._scheme.dtype)
        scale[scale == 0] = 2.0**-24 if self._scheme.layout == "x16" else 0
        return scale

    def _quantize(self, planes: NDArray[np.float32], scale: Array, zero: int, top: int) -> NDArray[np.uint8]:
        """clip(rint(w / scale + zero), 0, top); `planes` is overwritten, the result lies in the scratch."""
        divisor = scale.astype(np.float32)
        divisor[divisor == 0] = 1
        np.divide(planes, np.repeat(divisor, QUAD), out=planes)
        np.add(planes, np.float32(zero), out=planes)
        np.clip(planes, np.float32(0), np.float32(top), out=planes)
        np.rint(planes, out=planes)
        q = self._scratch.view(np.uint8)[: planes.size].reshape(planes.shape)
        np.copyto(q, planes, casting="unsafe")
        return q


def _merged(q: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Planes of eight codes of 4 or 5 bits, a byte each, as four planes of two nibbles a byte; the fifth bits
    are one plane more, eight to a byte. `q` is overwritten."""
    low, high = q[: PLANES // 2], q[PLANES // 2 :]
    fifth = None
    if bits == 5:
        fifth = np.zeros_like(q[:1])
        for plane, codes in enumerate(q):
            fifth |= (codes >> np.uint64(4) & np.uint64(0x0101010101010101)) << np.uint64(plane)
        np.bitwise_and(q, np.uint64(0x0F0F0F0F0F0F0F0F), out=q)
    # A nibble shifted by four stays inside its byte, so eight bytes are shifted at once.
    np.left_shift(high, 4, out=high)
    np.bitwise_or(high, low, out=high)
    return high if fifth is None else np.concatenate([high, fifth])


def _inverse(extreme: NDArray[np.float32], unit: int) -> NDArray[np.float32]:
    """unit / extreme of each group, zero where that is next to nothing."""
    tiny = np.abs(extreme) < TINY
    if not tiny.any():  # nearly always
        return np.divide(np.float32(unit), extreme)
    return np.where(tiny, np.float32(0), np.float32(unit) / np.where(tiny, np.float32(1), extreme))


def _over_groups(extreme: np.ufunc, planes: NDArray[np.float32]) -> NDArray[np.float32]:
    """The maximum or minimum of each group: [groups]. NaN goes through."""
    quads = extreme.reduce(planes, axis=0).reshape(-1, QUAD)
    found: NDArray[np.float32] = extreme(extreme(quads[:, 0], quads[:, 1]), extreme(quads[:, 2], quads[:, 3]))
    return found


def _of_quads(sums: NDArray[np.int16]) -> NDArray[np.float32]:
    """Sums of four neighbours in the last axis, none negative: [..., quads]. `sums` is overwritten."""
    words, halves = sums.view(np.uint64), np.uint64(0x0000FFFF0000FFFF)
    pairs = words & halves
    np.right_shift(words, 16, out=words)
    np.bitwise_and(words, halves, out=words)
    np.add(pairs, words, out=pairs)
    parts = pairs.view(np.uint32)
    found: NDArray[np.float32] = (parts[..., ::2] + parts[..., 1::2]).astype(np.float32)
    return found


def unpack(q_weight: Array, q_scale: Array, scheme: Scheme, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The matrix [N, K] that pack()'s tensors stand for: (q - zero) * scale in float32, padding cut off."""
    rows, columns = shape
    scale = q_scale.astype(np.float32)
    if scheme.layout == "x16":
        tiles, groups, _ = q_weight.shape
        words = q_weight.view(np.uint8).reshape(tiles, groups, 1, -1, TILE, QUAD)
        q = words
        if scheme.bits < 8:
            nibbles = words[:, :, :, : PLANES // 2]
            q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
        if scheme.bits == 5:
            places = np.arange(PLANES, dtype=np.uint8).reshape(2, PLANES // 2, 1, 1)
            q |= (words[:, :, :, PLANES // 2 :] >> places & 1) << 4
        # q: [tile, group, half, quad, row, weight]
        value = (q.astype(np.float32) - 2 ** (scheme.bits - 1)) * scale[:, :, None, None, :, None]
        whole = value.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * TILE, groups * GROUP)
    else:
        shifts = np.arange(0, 32, scheme.bits, dtype=np.uint32)
        q = (q_weight.view(np.uint32)[..., None] >> shifts) & np.uint32(2**scheme.bits - 1)
        centred = q.reshape(rows, -1, GROUP).astype(np.float32) - (2 ** (scheme.bits - 1) - 1)
        whole = (centred * scale[..., None]).reshape(rows, -1)
    return np.ascontiguousarray(whole[:rows, :columns])
