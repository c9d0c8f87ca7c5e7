"""Element by element: the gated activation of the MLP, scaling, and the soft cap of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, size_var
from mlcbuild.models import Activation

SERIAL_ROWS = 4
"""Rows of an activation that cost less than waking the other cores."""


@dataclass(frozen=True)
class Gate:
    """act(gate) * up of rows that hold `inner` values of either, the gate first."""

    isa: ISA
    activation: Activation
    inner: int

    def row(self, pair: Buffer, bias: Buffer | None, row: Expr, out: tuple[Buffer, Expr]) -> None:
        """Emit a row: pair [.., 2 * inner], bias [2 * inner]?, out = (buffer, row) of float32 [.., inner]."""
        floats = Floats.dividing(self.isa, self.inner)

        def read(at: Expr) -> Expr:
            value = floats.load(pair, row, at)
            return T.bind(value + floats.load(bias, at) if bias is not None else value)

        with T.serial(self.inner // floats.lanes) as k:
            at = k * floats.lanes
            gate, up = read(at), read(at + self.inner)
            floats.store(out[0], activate(floats, self.activation, gate) * up, out[1], at)


def activate(floats: Floats, activation: Activation, x: Expr) -> Expr:
    """silu(x) = x sigmoid(x); gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), the same curve as
    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)."""
    if activation == "silu":
        return x * floats.sigmoid(x)
    twice = 2 * math.sqrt(2 / math.pi)
    slope = floats.fma(x * x, floats.constant(twice * 0.044715), floats.constant(twice))
    return x * floats.sigmoid(x * slope)


def scaled(isa: ISA, factor: float, width: int) -> PrimFunc:
    """x float32 [n, width] times a constant, in place."""
    floats = Floats.dividing(isa, width)
    return _in_place("scale", floats, width, lambda x: x * floats.constant(factor))


def capped(isa: ISA, cap: float, width: int) -> PrimFunc:
    """cap * tanh(x / cap) of x float32 [n, width], in place."""
    floats = Floats.dividing(isa, width)
    return _in_place("soft_cap", floats, width, lambda x: floats.soft_cap(x, cap))


def _in_place(name: str, floats: Floats, width: int, change: Callable[[Expr], Expr]) -> PrimFunc:
    with kernel(name) as made:
        rows = size_var("n")
        x = made.tensor("x", (rows, width))

        def one_row(row: Expr) -> None:
            with T.serial(width // floats.lanes) as k:
                at = k * floats.lanes
                floats.store(x, change(T.bind(floats.load(x, row, at))), row, at)

        with made.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return made.func


def copied(isa: ISA, width: int) -> PrimFunc:
    """x float32 [n, width] -> a copy."""
    floats = Floats.dividing(isa, width)
    with kernel("copy") as made:
        rows = size_var("n")
        x = made.tensor("x", (rows, width))
        out = made.tensor("out", (rows, width))

        def one_row(row: Expr) -> None:
            with T.serial(width // floats.lanes) as k:
                floats.store(out, floats.load(x, row, k * floats.lanes), row, k * floats.lanes)

        with made.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return made.func


def gathered(isa: ISA, width: int) -> PrimFunc:
    """(x float32 [n, width], rows int32 [q]) -> these rows [q, width]."""
    floats = Floats.dividing(isa, width)
    with kernel("gather") as made:
        count = size_var("q")
        x = made.tensor("x", (size_var("n"), width))
        rows = made.tensor("rows", (count,), "int32")
        out = made.tensor("out", (count, width))

        def one_row(row: Expr) -> None:
            source = T.bind(rows[row])
            with T.serial(width // floats.lanes) as k:
                floats.store(out, floats.load(x, source, k * floats.lanes), row, k * floats.lanes)

        with made.body():
            over_rows(count, SERIAL_ROWS, one_row)
    return made.func
