"""A matrix in the x16 layout: how it is cut into tiles and groups."""

from __future__ import annotations

from dataclasses import dataclass

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import dot
from mlcbuild.compiler.cpu.kernels.quantize_activations import Records
from mlcbuild.quant.groups import GROUP, TILE

BLOCK_GROUPS = 16
"""Groups unpacked at a time: with two tiles 16 KiB, half of a small L1."""


@dataclass(frozen=True)
class TiledMatrix:
    """A stored matrix [n, k]."""

    isa: ISA
    bits: int
    n: int
    k: int

    @property
    def dot(self) -> dot.Products:
        return dot.Products(self.isa, self.bits)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's weights in one group."""
        return GROUP * TILE * self.bits // 8

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE)

    @property
    def vectors(self) -> int:
        """Vectors that the rows of a tile take."""
        return TILE // self.isa.lanes

    @property
    def records(self) -> Records:
        return Records(self.dot, self.k)

    @property
    def block_tiles(self) -> int:
        """Tiles unpacked together."""
        return max(1, self.isa.dot_tile[1] // self.vectors) if self.isa.dot_tile else 1

    @property
    def block_groups(self) -> int:
        """Groups unpacked together, all blocks being of nearly equal size."""
        groups = self.records.groups
        return -(-groups // -(-groups // BLOCK_GROUPS))
