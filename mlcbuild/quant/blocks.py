"""Describes the codes, scales and minima of quantized checkpoints: w = code * scale + minimum, with a scale
and perhaps a minimum for each group of 16 or 32 weights.

A scale is a float of its group, or two-level: the product of a float16 shared by 256 weights and an integer
of the group. Formats that keep these numbers, their kernels, and readers of checkpoints share these
descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlcbuild.quant.groups import GROUP

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_WEIGHTS = 256
"""Number of consecutive weights of a row that share a float16 in formats with two-level scales (float16 times
an integer of each group)."""


@dataclass(frozen=True)
class FloatCode:
    """A kind of 8-bit floats that are the codes of weights: a sign, an exponent and a fraction, with
    subnormal numbers (OCP 8-bit Floating Point Specification 1.0)."""

    exponent_bits: Literal[4, 5]
    """Number of bits of the exponent, whose bias is 2**(exponent_bits - 1) - 1."""
    largest: int
    """Largest code without its sign bit that is a finite number; those above are infinite or NaN."""

    @property
    def fraction_bits(self) -> int:
        return 7 - self.exponent_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1


E4M3, E5M2 = FloatCode(4, 126), FloatCode(5, 123)
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Code of GGUF's 4-bit types IQ4_NL and IQ4_XS -> the integer for which it stands."""
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Code of a 4-bit float (E2M1 of the OCP Microscaling specification 1.0) -> twice its value, an integer;
minus zero becomes 0."""


@dataclass(frozen=True)
class Blocks:
    """The types of codes, scales and minima that make up the weights of a stored format, or of a type of
    tensors in a checkpoint."""

    bits: Literal[3, 4, 5, 6, 8]
    """Number of bits in which one weight's integer code is stored."""
    group: Literal[16, 32] = 32
    """Number of consecutive weights that share a scale and, where there is one, a minimum."""
    scale: Literal["float16", "float32", "levels"] = "float16"
    """Type of the scales. "float16" or "float32": a number for each group. "levels": the scale of a group is
    a float16, shared by 256 weights of a row, times an int8 of the group."""
    minimum: bool = False
    """True if a minimum is added to each weight. It is a float16 of the group or, if `scale` is "levels", the
    product of a float16 shared by 256 weights and a uint8 of the group."""
    signed: bool = True
    """True if codes are from -2**(bits - 1) to 2**(bits - 1) - 1, stored with 2**(bits - 1) added; False if
    they are from 0 to 2**bits - 1.
    """
    floats: FloatCode | None = None
    """The kind of 8-bit floats that codes are; None: codes are integers."""
    table: tuple[int, ...] | None = None
    """The integers, -128 to 127, for which codes from 0 on stand; None: codes stand for themselves."""

    @property
    def zero(self) -> int:
        """Returns the number that is added to an integer code when it is stored: 2**(bits - 1) for signed
        codes, else 0."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def halves(self) -> int:
        """Returns the number of groups, each with a scale, in 32 consecutive weights: 1 or 2."""
        return GROUP // self.group

    @property
    def _span(self) -> tuple[int, int]:
        """Returns (smallest integer of a weight, largest one + 1) before scales are applied."""
        if self.table is not None:
            return min(self.table), max(self.table) + 1
        return -self.zero, (1 << self.bits) - self.zero

    def holds(self, other: Blocks) -> bool:
        """Returns True if a format with these codes and scales can store, without change, every weight that
        the codes and scales `other` can represent. Always False if their types of scales differ."""
        (low, high), (other_low, other_high) = self._span, other._span
        return (
            self.scale == other.scale
            and self.floats == other.floats
            and self.table in (None, other.table)
            and self.group <= other.group
            and self.minimum >= other.minimum
            and low <= other_low
            and other_high <= high
        )


@dataclass(frozen=True)
class BlockRows:
    """Some rows of a quantized matrix [rows, columns], whose weights are code * (scale * step) + minimum *
    minimum_step. Steps are the integer factors of each group of 16 or 32 weights, if the format has them.
    Each operation is rounded to float32."""

    codes: NDArray[np.int8] | NDArray[np.uint8]
    """The codes of the weights, [rows, columns]: int8 if they are signed, otherwise uint8."""
    scale: NDArray[np.float32]
    """The scales of the weights as float32, [rows, scales of a row]. Each applies to equally many columns, 16
    to 256; with two-level scales to 256, and `steps` multiplies it by an integer for each group."""
    steps: NDArray[np.int8] | None = None
    """The integers by which `scale` is multiplied for each group of 16 or 32 weights, [rows, columns / 16 or
    32]; None: all are 1."""
    minimum: NDArray[np.float32] | None = None
    """The minima of the groups, in the shape of `scale`. Each is multiplied by the integer in
    `minimum_steps`, if there are any, and added to the products of codes and scales; None: nothing is added.
    """
    minimum_steps: NDArray[np.uint8] | None = None
    """The integers by which `minimum` is multiplied for each group of 16 or 32 weights, [rows, columns / 16
    or 32]; None: all are 1."""

    def take(self, rows: NDArray[np.intp]) -> BlockRows:
        """Returns a new BlockRows with some rows of this one. rows: their indices, in the order of the
        result."""
        fields: list[Any] = [None if field is None else field[rows] for field in vars(self).values()]
        return BlockRows(*fields)
