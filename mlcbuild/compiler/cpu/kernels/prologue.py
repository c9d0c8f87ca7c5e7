"""What is fused around a matrix product: how rows of x come to be, and where results go.

A row is made by whoever packs or quantizes it, right before, in memory of its own: nothing but the product
ever sees it, so no tensor holds it, and no step of the program makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr

from mlcbuild.compiler.cpu.kernels.activation import Gate
from mlcbuild.compiler.cpu.kernels.floats import scratch
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.vectors import argument

SERIAL_ROWS = 4
"""Rows that are made ready sooner than the other cores would wake up."""


class Source(Protocol):
    """Where the rows of x [m, k] come from."""

    @property
    def packed(self) -> bool:
        """For tile registers, rows are there as tiles already, in the first argument."""
        ...

    @property
    def name(self) -> str:
        """The start of a kernel's name; empty for rows that are there already."""
        ...

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        """Declare the first arguments of the kernel."""
        ...

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        """Make a row of x: the buffer where it is float32, and its row there."""
        ...


@dataclass(frozen=True)
class Given:
    """x float32 [m, k] as it is; or in a tensor with `columns`, in the first ones, or packed where tile
    registers are to multiply it."""

    columns: int = 0

    @property
    def packed(self) -> bool:
        return self.columns > 0

    @property
    def name(self) -> str:
        return "packed_" * self.packed

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        return (argument("x", (m, self.columns or k), "float32"),)

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        return given[0], row


@dataclass(frozen=True)
class Normed:
    """The RMSNorm of x float32 [m, k] with weight [k]."""

    norm: Norm
    dtype: str
    """Of the weight."""
    packed = False

    @property
    def name(self) -> str:
        return f"rms_norm_{_short(self.dtype)}_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        return argument("x", (m, k), "float32"), argument("norm_weight", (k,), self.dtype)

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        (x, weight), floats = given, self.norm.floats
        line = scratch((1, self.norm.size))
        self.norm.row(
            lambda at: floats.load(x, row, at), weight, lambda at, value: floats.store(line, value, 0, at)
        )
        return line, T.int64(0)


@dataclass(frozen=True)
class Gated:
    """act(gate) * up of gate_up float32 [m, 2 * k], with a bias [2 * k] added before if there is one."""

    gate: Gate
    dtype: str | None
    """Of the bias."""
    packed: bool = False
    """For tile registers, the pair holds what is made of it already: see Fusion.gate."""

    @property
    def name(self) -> str:
        bias = f"bias_{_short(self.dtype)}_" if self.dtype else ""
        return f"{bias}{self.gate.activation}_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        pair = argument("gate_up", (m, 2 * k), "float32")
        return (pair, argument("bias", (2 * k,), self.dtype)) if self.dtype else (pair,)

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        line = scratch((1, self.gate.inner))
        self.gate.row(given[0], given[1] if self.dtype else None, row, (line, T.int64(0)))
        return line, T.int64(0)


def _short(dtype: str) -> str:
    return {"float32": "f32", "float16": "f16"}[dtype]


@dataclass(frozen=True)
class Fusion:
    """Both ends of a product."""

    source: Source = Given()
    bias: bool = False
    """Add a float32 bias [n]."""
    residual: bool = False
    """Add the results to what the output holds."""
    gate: Gate | None = None
    """The results are gates and ups. Tile registers then write what this makes of them, packed for the
    product that follows, in the output's place; other ways write the results."""

    def named(self, product: str) -> str:
        """The name of a kernel that computes this product."""
        gate = f"_{self.gate.activation}" if self.gate else ""
        return self.source.name + product + "_bias" * self.bias + "_add" * self.residual + gate
