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

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.activation import SCALARS, Gate, activate, xielu, xielu_factors
from mlcbuild.compiler.cpu.kernels.floats import Floats, scratch
from mlcbuild.compiler.cpu.kernels.norm import Norm
from mlcbuild.compiler.cpu.kernels.vectors import argument
from mlcbuild.models import Activation

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
    """The norm of x float32 [m, k], with its weight [k] and its bias [k], where it has them."""

    norm: Norm
    packed = False

    @property
    def name(self) -> str:
        types = [_short(dtype) for dtype in (self.norm.weight, self.norm.bias) if dtype]
        return "_".join([self.norm.name, *types, ""])

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        x = argument("x", (m, k), "float32")
        weights = self.norm.tensors(lambda name, dtype: argument(f"norm_{name}", (k,), dtype))
        return x, *(tensor for tensor in weights if tensor is not None)

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        (x, *rest), floats, norm = given, self.norm.floats, self.norm
        line = scratch((1, norm.size))
        weight = rest.pop(0) if norm.weight else None
        bias = rest.pop(0) if norm.bias else None
        norm.row(
            lambda at: floats.load(x, row, at),
            (weight, bias),
            lambda at, value: floats.store(line, value, 0, at),
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


@dataclass(frozen=True)
class Activated:
    """act(up) of up float32 [m, k], with a bias [k] added before if there is one. An activation with scalars
    of its own (xielu) takes them last."""

    isa: ISA
    activation: Activation
    inner: int
    dtype: str | None
    """Stored type of the bias."""
    scalars: str | None = None
    """Stored type of the activation's scalars."""
    packed = False

    @property
    def name(self) -> str:
        bias = f"bias_{_short(self.dtype)}_" if self.dtype else ""
        own = f"_{_short(self.scalars)}" if self.scalars else ""
        return f"{bias}{self.activation}{own}_plain_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        arguments = [argument("up", (m, k), "float32")]
        if self.dtype:
            arguments.append(argument("bias", (k,), self.dtype))
        if self.scalars:
            arguments.append(argument("scalars", (SCALARS,), self.scalars))
        return tuple(arguments)

    def row(self, given: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        (up, *rest), floats = given, Floats.dividing(self.isa, self.inner)
        bias = rest.pop(0) if self.dtype else None
        line = scratch((1, self.inner))
        own = xielu_factors(floats, rest[0]) if self.scalars else None
        with T.serial(self.inner // floats.lanes) as k:
            at = k * floats.lanes
            value = floats.load(up, row, at)
            value = T.bind(value + floats.load(bias, at) if bias is not None else value)
            active = activate(floats, self.activation, value) if own is None else xielu(floats, own, value)
            floats.store(line, active, 0, at)
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
