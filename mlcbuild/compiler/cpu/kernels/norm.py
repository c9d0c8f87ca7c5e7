"""RMSNorm and the residual stream: x / sqrt(mean(x^2) + eps) * (weight + offset), all in float32.

The residual stream `x` [n, hidden] is one float32 tensor that every layer adds to in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, registers, size_var

SERIAL_ROWS = 8
"""Rows of a norm that cost less than waking the other cores."""

Read = Callable[[Expr], Expr]
Write = Callable[[Expr, Expr], None]


@dataclass(frozen=True)
class Norm:
    """How one model normalises `size` values."""

    isa: ISA
    size: int
    eps: float
    offset: float

    @property
    def floats(self) -> Floats:
        return Floats.dividing(self.isa, self.size)

    def scale(self, read: Read) -> Expr:
        """1 / sqrt(mean(v^2) + eps) of the values that `read` gives, a vector at a time."""
        one, step = self.floats, self.floats.lanes
        parts = 4 if self.size % (4 * step) == 0 else 1
        whole = Floats(self.isa, parts * step)
        sums = registers(1, whole.lanes)[0]
        whole.store(sums, whole.constant(0.0), 0)
        with T.serial(self.size // whole.lanes) as k:
            for part in range(parts):
                value = T.bind(read(k * whole.lanes + part * step))
                one.store(sums, one.fma(value, value, one.load(sums, part * step)), part * step)
        found = [one.load(sums, part * step) for part in range(parts)]
        mean = one.fold(sum(found[1:], found[0]), lambda a, b: a + b) * one.scalar.constant(1 / self.size)
        return T.bind(T.float32(1.0) / T.sqrt(mean + one.scalar.constant(self.eps)))

    def row(self, read: Read, weights: Buffer, write: Write) -> None:
        """Normalise one row: `read(at)` gives and `write(at, value)` takes a vector that starts at `at`."""
        scale, floats = self.scale(read), self.floats
        with T.serial(self.size // floats.lanes) as k:
            at = k * floats.lanes
            weight = floats.load(weights, at)
            if self.offset:
                weight = weight + floats.constant(self.offset)
            write(at, read(at) * floats.spread(scale) * weight)


def rms_norm(norm: Norm, dtype: str) -> PrimFunc:
    """(x float32 [n, size], weight [size]) -> float32 [n, size]."""
    with kernel("rms_norm") as made:
        rows = size_var("n")
        x = made.tensor("x", (rows, norm.size))
        weight = made.tensor("weight", (norm.size,), dtype)
        out = made.tensor("out", (rows, norm.size))
        with made.body():
            over_rows(rows, SERIAL_ROWS, lambda row: norm.row(*_between(norm, (x, row), weight, (out, row))))
    return made.func


def gather_norm(norm: Norm, dtype: str) -> PrimFunc:
    """(x float32 [n, size], rows int32 [q], weight [size]) -> float32 [q, size]: the norm of chosen rows."""
    with kernel("gather_rms_norm") as made:
        total, count = size_var("n"), size_var("q")
        x = made.tensor("x", (total, norm.size))
        rows = made.tensor("rows", (count,), "int32")
        weight = made.tensor("weight", (norm.size,), dtype)
        out = made.tensor("out", (count, norm.size))

        def one_row(row: Expr) -> None:
            source = T.bind(rows[row])
            norm.row(*_between(norm, (x, source), weight, (out, row)))

        with made.body():
            over_rows(count, SERIAL_ROWS, one_row)
    return made.func


def _between(
    norm: Norm, source: tuple[Buffer, Expr], weight: Buffer, target: tuple[Buffer, Expr]
) -> tuple[Read, Buffer, Write]:
    """Arguments of Norm.row that read one row of a buffer and write one row of another."""
    floats = norm.floats
    return (
        lambda at: floats.load(*source, at),
        weight,
        lambda at, value: floats.store(target[0], value, target[1], at),
    )


@dataclass(frozen=True)
class Residual:
    """One addition to the residual stream that no product can make: x += [norm](delta [+ bias]).

    Each optional part is given as the stored type of its parameter; None leaves it out.
    """

    norm: Norm
    bias: str | None
    post_norm: str | None
    """Normalise what is added, before adding (Gemma 2)."""

    @property
    def name(self) -> str:
        words = {"bias": self.bias, "post_norm": self.post_norm, "add": "always"}
        return "_".join(word for word, present in words.items() if present)


def residual(spec: Residual) -> PrimFunc:
    """(delta float32 [n, size], bias [size]?, post weight [size]?, x float32 [n, size] in place)."""
    size = spec.norm.size
    with kernel(spec.name) as made:
        rows = size_var("n")
        delta = made.tensor("delta", (rows, size))
        bias = made.tensor("bias", (size,), spec.bias) if spec.bias else None
        post = made.tensor("post_weight", (size,), spec.post_norm) if spec.post_norm else None
        x = made.tensor("x", (rows, size))
        with made.body():
            over_rows(
                rows,
                SERIAL_ROWS,
                lambda row: _add_row(spec.norm, (delta, row), (bias, post), (x, row)),
            )
    return made.func


def _add_row(
    norm: Norm,
    delta: tuple[Buffer, Expr],
    extras: tuple[Buffer | None, Buffer | None],
    x: tuple[Buffer, Expr],
) -> None:
    floats, (bias, post) = norm.floats, extras

    def read(at: Expr) -> Expr:
        value = floats.load(*delta, at)
        return value + floats.load(bias, at) if bias is not None else value

    def add(at: Expr, value: Expr) -> None:
        floats.store(x[0], floats.load(*x, at) + value, x[1], at)

    if post is not None:
        norm.row(read, post, add)
        return
    with T.serial(norm.size // floats.lanes) as k:
        add(k * floats.lanes, read(k * floats.lanes))
