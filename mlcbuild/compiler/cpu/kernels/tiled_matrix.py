"""Emits reads of matrices in the x16 layout, which consists of tiles of 16 rows and groups of 32 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import dot
from mlcbuild.compiler.cpu.kernels.quantize_activations import Records
from mlcbuild.compiler.cpu.kernels.vectors import argument, load_f32, span, typed
from mlcbuild.quant import Storage
from mlcbuild.quant.blocks import BLOCK_WEIGHTS, Blocks
from mlcbuild.quant.groups import GROUP, TILE_ROWS

BLOCK_GROUPS = 32
"""Maximum number of groups of 32 weight columns that are unpacked into a buffer at a time: of 16 weight rows
they take 16 KiB, half of a small L1 cache. With 16, results of 576 columns are computed in two parts, and a
prompt takes 10 % longer with AVX2 on a core of Sapphire Rapids; 24 and 48 differ by less than 3 %
(`ci/bench/constants`)."""


@dataclass(frozen=True)
class TiledMatrix:
    """Emits reads of a stored matrix [n, k] in the x16 layout, which consists of tiles of 16 rows and 32
    columns.
    """

    isa: ISA
    scheme: Storage
    n: int
    k: int

    @property
    def bits(self) -> int:
        return self.scheme.bits

    @property
    def blocks(self) -> Blocks | None:
        """Returns the description of the format's codes, scales and minima; None for formats with a single
        scale per group of 32 weights and no minima.
        """
        return self.scheme.definition.blocks

    @property
    def zero(self) -> int:
        """Returns the number, 2**(bits - 1), that is subtracted from a stored code before the scale
        multiplies it; 0 in formats with unsigned codes.
        """
        return 1 << (self.bits - 1) if self.blocks is None else self.blocks.zero

    @property
    def name(self) -> str:
        return f"w{self.bits}a8" if self.blocks is None else f"{self.scheme.format}a8"

    def arguments(self, count: int) -> tuple[Buffer, ...]:
        """Declares the kernel's arguments for the tensors that store `count` matrices [n, k], one after the
        other, in tiles of 16 rows and groups of 32 columns (layout x16), and returns their buffers: codes,
        scales, and minima if the format has them. Two-level scales and minima have two buffers each: integers
        of the groups, then a float16 for 256 weights of a row.
        """
        tensors = ((item, item.shape(self.n, self.k)) for item in self.scheme.definition.tensors)
        return tuple(
            argument(item.suffix, (count * shape[0], *shape[1:]), item.dtype) for item, shape in tensors
        )

    def scales(self, weights: Sequence[Buffer], place: tuple[Expr, Expr, int], half: int) -> Expr:
        """Emits loads of the quantization scales of one vector of weight rows for one half of a group of 32
        columns, and returns them as a float32 vector with a lane for each row. weights: the buffers that
        `arguments` returned; place: (index of the stored tile of 16 rows, group, index of the vector of rows
        in the tile); half: 0 or 1; 0 if the group has one scale.
        """
        return self._numbers(weights[1:], place, half, "int8")

    def minima(self, weights: Sequence[Buffer], place: tuple[Expr, Expr, int], half: int) -> Expr:
        """Emits loads of the quantization minima of one vector of weight rows for one half of a group of 32
        columns, and returns them as a float32 vector with a lane for each row. The format must have minima.
        weights: the buffers that `arguments` returned; place: (index of the stored tile of 16 rows, group,
        index of the vector of rows in the tile); half: 0 or 1; 0 if the group has one minimum.
        """
        first = len(weights) // 2 + 1
        return self._numbers(weights[first:], place, half, "uint8")

    def _numbers(
        self, tensors: Sequence[Buffer], place: tuple[Expr, Expr, int], half: int, steps: str
    ) -> Expr:
        tile, group, vector = place
        lanes = self.isa.lanes
        return self._loaded(tensors, (tile, group, vector * lanes), half, steps, lanes)

    def row_numbers(
        self, weights: Sequence[Buffer], place: tuple[Expr, Expr, Expr]
    ) -> tuple[list[Expr], list[Expr]]:
        """Emits loads of the scales and minima of one weight row in one group of 32 columns, and returns
        (scales, minima). Each list has two float32 values if the halves of the group have separate scales,
        else one; minima is [] for weights without minima. weights: the buffers that `arguments` returned;
        place: (index of the stored tile, group, row of the tile).
        """
        halves, first = range(self.records.halves), len(weights) // 2 + 1
        minima = halves if self.records.sums else range(0)
        return (
            [T.bind(self._loaded(weights[1:], place, half, "int8", 1)) for half in halves],
            [T.bind(self._loaded(weights[first:], place, half, "uint8", 1)) for half in minima],
        )

    def _loaded(
        self,
        tensors: Sequence[Buffer],
        place: tuple[Expr, Expr, Expr | int],
        half: int,
        steps: str,
        lanes: int,
    ) -> Expr:
        """Emits loads of the quantization scales, or the minima, of `lanes` consecutive weight rows for one
        half of a group of 32 columns, and returns them as a float32 vector with a lane for each row.

        tensors: the stored tensors that hold the scales or minima; place: (index of the stored tile of 16
        rows, group, first row in the tile); half: 0 or 1; steps: in formats with two-level scales, the dtype
        of each group's integer, by which the scale of 256 weights is multiplied; not used in other formats.
        """
        tile, group, lane = place
        if self.blocks is None or self.blocks.scale != "levels":
            return load_f32(self.isa, tensors[0], (tile, group, half * TILE_ROWS + lane), lanes)
        raw = T.reinterpret(
            typed(steps, lanes), tensors[0][tile, group, span(half * TILE_ROWS + lane, lanes)]
        )
        block = load_f32(self.isa, tensors[1], (tile, group // (BLOCK_WEIGHTS // GROUP), lane), lanes)
        return T.bind(T.Cast(typed("float32", lanes), raw) * block)

    @property
    def dot(self) -> dot.Products:
        blocks = self.blocks
        if blocks is None:
            return dot.Products(self.isa, self.bits)
        return dot.Products(self.isa, self.bits, blocks.signed, blocks.table)

    @property
    def tile_bytes(self) -> int:
        """Returns the number of bytes that the codes (quantized weights) of 16 rows and 32 columns take: one
        tile of rows in one group of columns."""
        return GROUP * TILE_ROWS * self.bits // 8

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE_ROWS)

    @property
    def vectors(self) -> int:
        """Returns the number of vectors that cover the 16 rows of a tile of weights."""
        return TILE_ROWS // self.isa.lanes

    @property
    def records(self) -> Records:
        return Records(self.dot, self.k, self.blocks)

    @property
    def block_tiles(self) -> int:
        """Returns the number of tiles, of 16 weight rows each, that are unpacked into a scratch buffer at a
        time; 1 on instruction sets whose products do not unpack blocks.
        """
        return max(1, self.isa.dot_tile[1] // self.vectors) if self.isa.dot_tile else 1

    @property
    def block_groups(self) -> int:
        """Returns the number of groups of 32 weight columns that are unpacked into a scratch buffer at a
        time: at most 32, chosen so that all parts of a row have nearly equal size.
        """
        groups = self.records.groups
        return -(-groups // -(-groups // BLOCK_GROUPS))
