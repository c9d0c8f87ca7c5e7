"""Emits kernels that work element by element: activation functions, bias, scale, soft cap, and copies of
rows.
"""

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
"""Maximum number of rows for which one core alone runs a kernel that works element by element, since waking
the other cores would take longer; `ci/bench/kernels --threads 2` prints how long waking takes."""


@dataclass(frozen=True)
class Gate:
    """A gated activation, act(gate) * up, for rows that hold `inner` gates followed by `inner` ups. act: the
    activation function.
    """

    isa: ISA
    activation: Activation
    inner: int

    def row(self, pair: Buffer, bias: Buffer | None, row: Expr, out: tuple[Buffer, Expr]) -> None:
        """Emits code that computes act(gate) * up for one row. pair: buffer [.., 2 * inner] of gates, then
        ups; bias: [2 * inner], which is added to gates and ups first, or None; row: index of the row of
        `pair`; out: (buffer float32 [.., inner], index of the result's row)."""
        floats = Floats.dividing(self.isa, self.inner)

        def read(at: Expr) -> Expr:
            value = floats.load(pair, row, at)
            return T.bind(value + floats.load(bias, at) if bias is not None else value)

        with T.serial(self.inner // floats.lanes) as k:
            at = k * floats.lanes
            gate, up = read(at), read(at + self.inner)
            floats.store(out[0], activate(floats, self.activation, gate) * up, out[1], at)


def activate(floats: Floats, activation: Activation, x: Expr) -> Expr:
    """Emits an activation function of a float32 vector x, and returns its value (an expression). silu(x) = x
    sigmoid(x); relu(x) = max(x, 0); relu2(x) = relu(x)^2; gelu is the exact GELU; gelu_tanh(x) = x sigmoid(2
    sqrt(2/pi) (x + 0.044715 x^3)), the same curve as 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    (Hendrycks and Gimpel, 2016). For xIELU, which has parameters, there is the function `xielu`."""
    if activation == "silu":
        return x * floats.sigmoid(x)
    if activation == "gelu":
        return _gelu(floats, x)
    if activation in ("relu", "relu2"):
        above = T.bind(T.max(x, floats.constant(0.0)))
        return above if activation == "relu" else above * above
    twice = 2 * math.sqrt(2 / math.pi)
    slope = floats.fma(x * x, floats.constant(twice * 0.044715), floats.constant(twice))
    return x * floats.sigmoid(x * slope)


ERFC_TAIL = (
    *(-1.2654151, 0.9979783, 0.39215496, 0.008687083, 0.076345526),
    *(-0.21976045, -0.52955323, 1.0327699, -0.62863165, 0.13542472),
)
"""Coefficients of ln(erfc(z) / t) + z^2 in rising powers of t = 1 / (1 + z / 2), fitted for z up to 9 and
rounded to float32. They give erfc with a relative error of 1e-7. They are constants because a fit at import
time would have other last bits on other machines, and libraries would differ.
"""


def _gelu(floats: Floats, x: Expr) -> Expr:
    """Emits the exact GELU of a float32 vector x, x (1 + erf(x / sqrt 2)) / 2, and returns its value. With z
    = |x| / sqrt 2 and t = 1 / (1 + z / 2), it uses erfc(z) = t exp(polynomial(t) - z^2), so that the small
    results of negative x have a small relative error.
    """
    size = T.bind(floats.fabs(x))
    t = T.bind(
        floats.constant(1.0) / floats.fma(size, floats.constant(math.sqrt(0.5) / 2), floats.constant(1.0))
    )
    power = floats.constant(ERFC_TAIL[-1])
    for coefficient in reversed(ERFC_TAIL[:-1]):
        power = floats.fma(power, t, floats.constant(coefficient))
    tail = T.bind(t * floats.exp(power - x * x * floats.constant(0.5)) * floats.constant(0.5))
    return x * T.Select(x < floats.constant(0.0), tail, floats.constant(1.0) - tail)


SCALARS = 4
"""Number of scalar parameters of the activation xIELU: alpha_p, alpha_n, beta, eps."""


def xielu_factors(floats: Floats, scalars: Buffer) -> tuple[Expr, ...]:
    """Emits the constants of the activation xIELU as float32 vectors and returns them: softplus(alpha_p),
    beta + softplus(alpha_n), beta, eps. scalars: buffer with alpha_p, alpha_n, beta, eps.
    """
    one = floats.scalar
    alpha_p, alpha_n, beta, eps = (T.bind(one.load(scalars, i)) for i in range(SCALARS))

    def softplus(x: Expr) -> Expr:
        tail = one.exp(one.constant(0.0) - one.fabs(x))
        return T.max(x, one.constant(0.0)) + T.log(one.constant(1.0) + tail)

    values = (softplus(alpha_p), beta + softplus(alpha_n), beta, eps)
    return tuple(T.bind(floats.spread(T.bind(value))) for value in values)


def xielu(floats: Floats, factors: tuple[Expr, ...], x: Expr) -> Expr:
    """Emits the activation xIELU (Huang and Schlag, 2024) of a float32 vector x and returns its value: a x^2
    + beta x for x > 0, else b (exp(min(x, eps)) - 1 - x) + beta x. factors: four float32 vectors with all
    lanes equal: a = softplus(alpha_p), b = beta + softplus(alpha_n), beta and eps, where alpha_p, alpha_n,
    beta and eps are the activation's parameters."""
    above, below, beta, eps = factors
    left = floats.exp(T.min(x, eps)) - floats.constant(1.0) - x
    return T.Select(x > floats.constant(0.0), above * x * x, left * below) + beta * x


def scaled(isa: ISA, factor: float, width: int) -> PrimFunc:
    """Returns the kernel (x float32 [n, width]) that multiplies x by the constant `factor`, in place."""
    floats = Floats.dividing(isa, width)
    return _in_place("scale", floats, width, lambda x: x * floats.constant(factor))


def biased(isa: ISA, width: int, dtype: str) -> PrimFunc:
    """Returns the kernel (bias [width], x float32 [n, width]) that adds the bias to x, in place. dtype:
    stored type of the bias.
    """
    floats = Floats.dividing(isa, width)
    with kernel("add_bias") as emitter:
        rows = size_var("n")
        bias = emitter.tensor("bias", (width,), dtype)
        x = emitter.tensor("x", (rows, width))

        def one_row(row: Expr) -> None:
            with T.serial(width // floats.lanes) as k:
                at = k * floats.lanes
                floats.store(x, floats.load(x, row, at) + floats.load(bias, at), row, at)

        with emitter.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return emitter.func


def shifted(shift: int) -> PrimFunc:
    """Returns the kernel (positions int32 [n], out int32 [n]) that adds the constant `shift` to each position
    and writes the sums to `out`."""
    with kernel("shift") as emitter:
        rows = size_var("n")
        positions = emitter.tensor("positions", (rows,), "int32")
        out = emitter.tensor("out", (rows,), "int32")
        with emitter.body(), T.serial(rows) as row:
            T.buffer_store(out, positions[row] + T.int32(shift), [row])
    return emitter.func


def capped(isa: ISA, cap: float, width: int) -> PrimFunc:
    """Returns the kernel (x float32 [n, width]) that replaces x by cap * tanh(x / cap), in place."""
    floats = Floats.dividing(isa, width)
    return _in_place("soft_cap", floats, width, lambda x: floats.soft_cap(x, cap))


def _in_place(name: str, floats: Floats, width: int, change: Callable[[Expr], Expr]) -> PrimFunc:
    with kernel(name) as function:
        rows = size_var("n")
        x = function.tensor("x", (rows, width))

        def one_row(row: Expr) -> None:
            with T.serial(width // floats.lanes) as k:
                at = k * floats.lanes
                floats.store(x, change(T.bind(floats.load(x, row, at))), row, at)

        with function.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return function.func


def copied(isa: ISA, width: int) -> PrimFunc:
    """Returns the kernel (x float32 [n, width], out float32 [n, width]) that copies x to `out`."""
    floats = Floats.dividing(isa, width)
    with kernel("copy") as function:
        rows = size_var("n")
        x = function.tensor("x", (rows, width))
        out = function.tensor("out", (rows, width))

        def one_row(row: Expr) -> None:
            with T.serial(width // floats.lanes) as k:
                floats.store(out, floats.load(x, row, k * floats.lanes), row, k * floats.lanes)

        with function.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return function.func


def gathered(isa: ISA, width: int) -> PrimFunc:
    """Returns the kernel (x float32 [n, width], rows int32 [q], out float32 [q, width]) that copies the rows
    of x with the indices `rows` to `out`; the indices are not checked.
    """
    floats = Floats.dividing(isa, width)
    with kernel("gather") as function:
        count = size_var("q")
        x = function.tensor("x", (size_var("n"), width))
        rows = function.tensor("rows", (count,), "int32")
        out = function.tensor("out", (count, width))

        def one_row(row: Expr) -> None:
            source = T.bind(rows[row])
            with T.serial(width // floats.lanes) as k:
                floats.store(out, floats.load(x, source, k * floats.lanes), row, k * floats.lanes)

        with function.body():
            over_rows(count, SERIAL_ROWS, one_row)
    return function.func
