"""Quantizes matrices with one scale per group of 32 weights, packs them, and dequantizes them.

Some rows that fit a core's cache are quantized at once. They are rearranged to an array [8, 4 * groups],
whose row i holds the i-th four weights (a quad) of every group. Every step is then one NumPy call over long
contiguous rows, in memory that is reused, and a scale is broadcast to eight rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlcbuild.quant import row_packing
from mlcbuild.quant.floats import BLOCK, OVERFLOW, Array, Scratch, largest, not_finite, overflow, widen
from mlcbuild.quant.groups import GROUP, QUAD, QUADS, TILE_ROWS, Groups
from mlcbuild.quant.search import SEARCHES, fit

LEAST_SCALE = 2.0**-24
"""The smallest float16 above zero, which is stored in place of a signed scale that rounds to zero."""


class Packer:
    """Quantizes rows of one weight matrix and packs the codes, in reusable scratch memory."""

    def __init__(self, groups: Groups, tile: int, columns: int, scratch: Scratch, name: str) -> None:
        """Prepares to pack rows of one matrix. groups: bits, rounding and type of scales of the format's
        groups of 32 weights; tile: 16 for tiles of 16 rows (the layout x16), 1 for the layout `row`; columns:
        number of weights in a row; scratch: memory for temporary arrays, reused; name: the matrix in error
        messages."""
        self._format = groups
        self._tile = tile
        self._name = name
        self._columns = columns
        self._groups = -(-columns // GROUP)
        """Number of groups of 32 weights in one row of the matrix, padded to whole groups."""
        self._scratch = scratch

    def pack(self, weight: Array, q_weight: Array, q_scale: Array) -> None:
        """Quantizes `weight` [N, K] (float32, float16, or bfloat16 bits in uint16), and writes its codes into
        `q_weight` and its scales into `q_scale`: [N, words] and [N, groups] in the layout `row`, or [tiles,
        groups, 64 * bits] and [tiles, groups, 16] in the layout x16.

        Raises TypeError for another dtype, CheckpointError for weights that are infinite or NaN, and for
        float16 scales that overflow.
        """
        if weight.dtype not in (np.float32, np.float16, np.uint16):
            raise TypeError(f"cannot pack {weight.dtype}: pass float32, float16, or bfloat16 bits in uint16")
        rows = weight.shape[0]
        step = max(1, BLOCK // (self._groups * GROUP) // self._tile) * self._tile
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = self._padded(weight[start:stop])
            first, last = start // self._tile, -(-stop // self._tile)
            if self._tile == TILE_ROWS:
                self._tiles(block, q_weight[first:last], q_scale[first:last])
            else:
                self._lines(block, q_weight[first:last], q_scale[first:last])

    def _padded(self, block: Array) -> Array:
        """Returns `block`, some rows of a matrix, as a contiguous array, padded with zeros to whole groups of
        32 columns and, for the layout in tiles, to a multiple of 16 rows; `block` itself if it is so
        already."""
        rows, columns = -(-block.shape[0] // self._tile) * self._tile, self._groups * GROUP
        if block.shape == (rows, columns):
            return np.ascontiguousarray(block)
        padded = np.zeros((rows, columns), block.dtype)
        padded[: block.shape[0], : self._columns] = block
        return padded

    def _planes(self, block: Array, shape: tuple[int, ...], order: tuple[int, ...]) -> NDArray[np.float32]:
        """Rearranges the weights of some rows and returns them as float32 [8, 4 * groups] in scratch memory:
        row i holds the i-th quad (four consecutive weights) of every group of 32 weights.

        block: the rows, float32, float16, or bfloat16 bits in uint16, contiguous, in whole groups. shape:
        (..., 8), in which `block` is viewed as an array of quads; the last dimension is the quad's index in
        its group. order: permutation of these dimensions, with the last one first; the order of the others is
        that of the groups in the result.
        """
        quad = np.dtype(np.complex128 if block.itemsize == 4 else np.uint64)
        quads = block.view(quad).reshape(shape).transpose(order)
        out = self._scratch.array("planes", (QUADS, block.size // QUADS), np.float32)
        if block.itemsize == 4:
            np.copyto(out.view(quad).reshape(quads.shape), quads)
            return out
        moved = self._scratch.array("moved", quads.shape, quad)
        np.copyto(moved, quads)
        widen(moved.reshape(-1).view(block.dtype).reshape(out.shape), out)
        return out

    def _lines(self, block: Array, q_weight: Array, q_scale: Array) -> None:
        """Quantizes the rows of `block` [rows, columns], and writes codes, packed in 32-bit words, into
        `q_weight` [rows, words] and scales into `q_scale` [rows, groups] (the layout `row`). Raises
        CheckpointError for infinite or NaN weights, and for float16 scales that overflow."""
        groups = q_scale.size
        planes = self._planes(block, (groups, QUADS), (1, 0))
        q = self._quantize(planes, q_scale.reshape(groups))
        if self._format.bits == 8:
            q_weight.reshape(groups, QUADS)[...] = q.view(np.uint32).T
            return
        if self._format.bits == 5:
            codes = np.ascontiguousarray(q.view(np.uint32).T).view(np.uint8).reshape(len(block), -1)
            q_weight[...] = row_packing.pack_codes(codes, 5)
            return
        # Two bytes b0, b1 become b0 | b1 << 4: in a little-endian uint16 that is the low byte of x | x >> 4.
        pairs = q.view(np.uint16)
        merged = self._scratch.array("codes", pairs.shape, np.uint16)
        np.right_shift(pairs, 4, out=merged)
        np.bitwise_or(pairs, merged, out=merged)
        q_weight.view(np.uint16).reshape(groups, QUADS)[...] = merged.astype(np.uint8).view(np.uint16).T

    def _tiles(self, block: Array, q_weight: Array, q_scale: Array) -> None:
        """Quantizes the rows of `block`, whole tiles of 16, and writes the codes into `q_weight`, uint8
        [tiles, groups, 64 * bits], whose bytes are ordered [line][row][weight of a quad], and the scales into
        `q_scale` [tiles, groups, 16]. A quad is four consecutive weights. With 8 bits, line j holds quad j;
        with 4 or 5, line j of four holds the low four bits of quad j and, above them, of quad 4 + j, and a
        fifth line the fifth bits, quad 0 lowest. Raises CheckpointError for infinite or NaN weights, and for
        float16 scales that overflow."""
        tiles, groups, _ = q_scale.shape
        planes = self._planes(block, (tiles, TILE_ROWS, groups, QUADS), (3, 0, 2, 1))
        q = self._quantize(planes, q_scale.reshape(-1)).view(np.uint64)
        if self._format.bits < 8:
            q = _merged(q, self._format.bits)
        words = q.view(np.uint32).reshape(len(q), tiles, groups, TILE_ROWS)
        q_weight.view(np.uint32).reshape(tiles, groups, len(q), TILE_ROWS)[...] = words.transpose(1, 2, 0, 3)

    def _quantize(self, planes: NDArray[np.float32], out: Array) -> NDArray[np.uint8]:
        """Quantizes groups of 32 weights and returns their codes, one byte each from 0 to the format's
        largest code, uint8 [8, 4 * groups] in scratch memory that the next call overwrites. planes: the
        weights, float32 in the same shape, whose row i holds the i-th four weights of every group;
        overwritten. out: receives the scale of each group, [groups]. Raises CheckpointError for infinite or
        NaN weights, and for float16 scales that overflow."""
        groups = self._format
        out[...] = scale = self._scales(planes)
        divisor = scale.astype(np.float32)
        divisor[divisor == 0] = 1
        np.divide(planes, np.repeat(divisor, QUAD), out=planes)
        np.add(planes, np.float32(groups.zero), out=planes)
        np.clip(planes, np.float32(0), np.float32(groups.top), out=planes)
        np.rint(planes, out=planes)
        q = self._scratch.array("moved", planes.shape, np.uint8)
        np.copyto(q, planes, casting="unsafe")
        return q

    def _scales(self, planes: NDArray[np.float32]) -> Array:
        """Computes the scale of each group of 32 weights and returns [groups] in the stored dtype: with 8
        bits the largest magnitude divided by the code of the weight 0, with fewer the scale of least squared
        error, weighted by the weights' magnitudes. If the format has signed scales, a scale has the opposite
        sign of the weight of largest magnitude, and 2**-24 stands in place of 0. planes: float32 [8, 4 *
        groups], whose row i holds the i-th four weights of every group. Raises CheckpointError for infinite
        or NaN weights and for float16 scales that overflow."""
        groups = self._format
        extreme = self._extreme(planes)
        if groups.bits in SEARCHES:
            wide = fit(SEARCHES[groups.bits], planes, extreme, self._scratch)
            wide = -wide if groups.signed else wide
        else:
            dividend, divisor = (extreme, -groups.zero) if groups.signed else (np.abs(extreme), groups.zero)
            wide = np.divide(dividend, divisor, dtype=np.float32)
        greatest = largest(wide)
        if groups.dtype == "float16" and greatest >= OVERFLOW:
            raise overflow(self._name, greatest, "weights that need a scale of ")
        scale: Array = wide.astype(groups.dtype)
        scale[scale == 0] = LEAST_SCALE if groups.signed else 0
        return scale

    def _extreme(self, planes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the weight of largest magnitude of each group, with its sign, the positive one of two equal
        ones: float32 [groups]. planes: float32 [8, 4 * groups], whose row i holds the i-th four weights of
        every group. Raises CheckpointError if a weight is infinite or NaN."""
        high, low = _over_groups(np.maximum, planes), _over_groups(np.minimum, planes)
        extreme = np.where(high >= -low, high, low)
        if not math.isfinite(largest(extreme)):
            raise not_finite(self._name)
        return extreme


def _merged(q: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Packs the codes of quantized weights, of 4 or 5 bits. q: uint64 in eight rows, each byte one code;
    overwritten. Returns four rows: each byte of row j holds the low four bits of the code at its place in row
    j and, above them, those of the code at the same place in row 4 + j. With 5 bits, a fifth row follows; bit
    i of its bytes is the fifth bit of the code in row i."""
    low, high = q[: QUADS // 2], q[QUADS // 2 :]
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


def _over_groups(extreme: np.ufunc, planes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the largest or smallest weight of each group of 32, float32 [groups]; NaN for a group that has
    a NaN. extreme: np.maximum or np.minimum; planes: the weights [8, 4 * groups], of which columns 4g to 4g +
    3 are group g."""
    quads = extreme.reduce(planes, axis=0).reshape(-1, QUAD)
    both: NDArray[np.float32] = extreme(extreme(quads[:, 0], quads[:, 1]), extreme(quads[:, 2], quads[:, 3]))
    return both


def unpack_rows(groups: Groups, tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Dequantizes a matrix that is stored row by row and returns (code - zero) * scale, float32 [N, K]
    without padding; zero is the code of the weight 0. tensors: q_weight uint32 [N, words], the packed codes,
    and q_scale [N, groups of 32]; shape: (N, K); groups: bits and zero of the format."""
    q_weight, q_scale = tensors
    rows, columns = shape
    q = row_packing.unpack_codes(q_weight.view(np.uint32), groups.bits, -(-columns // GROUP))
    centred = q.reshape(rows, -1, GROUP).astype(np.float32) - groups.zero
    values = (centred * q_scale.astype(np.float32)[..., None]).reshape(rows, -1)
    return np.ascontiguousarray(values[:, :columns])


def unpack_tiles(groups: Groups, tensors: Sequence[Array], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Dequantizes a matrix in tiles of 16 rows (the layout x16) and returns (code - zero) * scale, float32
    [N, K] without padding; zero is the code of the weight 0. tensors: q_weight uint8 [tiles, groups of 32, 64
    * bits], the packed codes, and q_scale [tiles, groups of 32, 16]; shape: (N, K); groups: bits and zero of
    the format."""
    q_weight, q_scale = tensors
    rows, columns = shape
    tiles, count, _ = q_weight.shape
    words = q_weight.view(np.uint8).reshape(tiles, count, 1, -1, TILE_ROWS, QUAD)
    q = words
    if groups.bits < 8:
        nibbles = words[:, :, :, : QUADS // 2]
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    if groups.bits == 5:
        places = np.arange(QUADS, dtype=np.uint8).reshape(2, QUADS // 2, 1, 1)
        q |= (words[:, :, :, QUADS // 2 :] >> places & 1) << 4
    # q: [tile, group, half, quad, row, weight]
    value = (q.astype(np.float32) - groups.zero) * q_scale.astype(np.float32)[:, :, None, None, :, None]
    matrix = value.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * TILE_ROWS, count * GROUP)
    return np.ascontiguousarray(matrix[:rows, :columns])
