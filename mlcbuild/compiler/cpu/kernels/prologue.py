"""Describes what one kernel computes together with a matrix product: the rows of its input x before it
(prologue), and bias, addition or activation of its results after it (epilogue).

If a prologue computes rows, such as those of a norm, the code that packs or quantizes a row of x computes the
row immediately before, in a scratch buffer. Only the product reads the row, so no tensor holds it and no
separate kernel computes it.
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

SERIAL_BYTES = 48 << 10
"""Number of bytes of a matrix below which one core multiplies it alone, since waking others costs more: if x
has one row or, with a router's matrix, at most SERIAL_ROWS rows. `ci/bench/kernels --threads 2` prints what
waking costs.
"""
SERIAL_ROWS = 4
"""Maximum number of rows of x that one core packs for products in float32 alone, or multiplies alone with a
router's matrix of less than SERIAL_BYTES, since waking the other cores would take longer; `ci/bench/kernels
--threads 2` prints how long waking takes.
"""


class RowSource(Protocol):
    """The interface of the prologue of a matrix product: code, fused in front of the product, that computes
    the rows of its input x [m, k].
    """

    @property
    def packed(self) -> bool:
        """Returns True if the input of a matrix product needs no packing in calls for prompts: the first
        tensor from which it is read then holds all rows as tiles for AMX. In other calls the method `row`
        reads the rows, or computes them, from that tensor.
        """
        ...

    @property
    def name(self) -> str:
        """Returns the beginning of the names of kernels that compute the input rows of a matrix product with
        this prologue, such as silu_; "" if the rows are read as they are."""
        ...

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        """Declares the arguments of a matrix product's kernel from which the rows of the input x [m, k] are
        computed, such as x itself and the weights of a norm, and returns their buffers.
        """
        ...

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        """Emits code that computes one input row of a matrix product, such as a norm or an activation, and
        returns (buffer that holds the row as float32, index of the row in it). Emits nothing if the rows are
        read as they are. arguments: buffers of the kernel's arguments, as the method `arguments` returned
        them; row: index of the row.
        """
        ...


@dataclass(frozen=True)
class Given:
    """The input of a matrix product that is read as it is: x, float32 [m, k]. If `columns` is not 0, the
    tensor is float32 [m, columns] with more than k columns: in calls for prompts its start holds all of x
    packed for AMX, in other calls the first k columns are x.
    """

    columns: int = 0

    @property
    def packed(self) -> bool:
        return self.columns > 0

    @property
    def name(self) -> str:
        return "packed_" * self.packed

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        return (argument("x", (m, self.columns or k), "float32"),)

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        return arguments[0], row


@dataclass(frozen=True)
class Normed:
    """The input of a matrix product that consists of normalized rows of x, float32 [m, k], computed in the
    same kernel. Its tensors are x and the norm's weight [k] and bias [k], if it has them.
    """

    norm: Norm
    packed = False

    @property
    def name(self) -> str:
        norm = self.norm
        types = [_short(dtype) for dtype in (norm.weight, norm.bias) if dtype]
        numbers = [_letters(norm.eps), *([f"plus{_letters(norm.offset)}"] if norm.offset else [])]
        return "_".join([norm.name, *numbers, *types, ""])

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        x = argument("x", (m, k), "float32")
        weights = self.norm.tensors(lambda name, dtype: argument(f"norm_{name}", (k,), dtype))
        return x, *(tensor for tensor in weights if tensor is not None)

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        (x, *rest), floats, norm = arguments, self.norm.floats, self.norm
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
    """The input of a matrix product that consists of act(gate) * up, computed in the same kernel from
    gate_up, float32 [m, 2 * k], after adding a bias [2 * k] if there is one.
    """

    gate: Gate
    dtype: str | None
    """Stored type of the bias that is added to the values of gate and up before the activation; None if there
    is none.
    """
    packed: bool = False
    """True if the tensor from which rows are read, [m, 2 * k], for prompts no longer holds gates and ups but
    already act(gate) * up, packed as AMX tiles by the product that computed gates and ups.
    """

    @property
    def name(self) -> str:
        bias = f"bias_{_short(self.dtype)}_" if self.dtype else ""
        return f"{bias}{self.gate.activation}_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        pair = argument("gate_up", (m, 2 * k), "float32")
        return (pair, argument("bias", (2 * k,), self.dtype)) if self.dtype else (pair,)

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        line = scratch((1, self.gate.inner))
        self.gate.row(arguments[0], arguments[1] if self.dtype else None, row, (line, T.int64(0)))
        return line, T.int64(0)


@dataclass(frozen=True)
class Activated:
    """The input of a matrix product that consists of act(up), computed in the same kernel from up, float32
    [m, k], after adding a bias [k] if there is one. The parameters of an activation that has some (xIELU) are
    the last tensor.
    """

    isa: ISA
    activation: Activation
    inner: int
    dtype: str | None
    """Stored type of the bias that is added before the activation; None if there is none."""
    scalars: str | None = None
    """Stored type, such as "float16", of the scalar parameters of the activation function (only xIELU has
    some); None if it has none."""
    packed = False

    @property
    def name(self) -> str:
        bias = f"bias_{_short(self.dtype)}_" if self.dtype else ""
        scalars = f"_{_short(self.scalars)}" if self.scalars else ""
        return f"{bias}{self.activation}{scalars}_plain_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        arguments = [argument("up", (m, k), "float32")]
        if self.dtype:
            arguments.append(argument("bias", (k,), self.dtype))
        if self.scalars:
            arguments.append(argument("scalars", (SCALARS,), self.scalars))
        return tuple(arguments)

    def row(self, arguments: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        (up, *rest), floats = arguments, Floats.dividing(self.isa, self.inner)
        bias = rest.pop(0) if self.dtype else None
        line = scratch((1, self.inner))
        factors = xielu_factors(floats, rest[0]) if self.scalars else None
        with T.serial(self.inner // floats.lanes) as k:
            at = k * floats.lanes
            value = floats.load(up, row, at)
            value = T.bind(value + floats.load(bias, at) if bias is not None else value)
            active = (
                activate(floats, self.activation, value) if factors is None else xielu(floats, factors, value)
            )
            floats.store(line, active, 0, at)
        return line, T.int64(0)


def _letters(number: float) -> str:
    """Returns a number as a part of a symbol's name: its repr with "m" for "-", "p" for "." and no "+". 1e-05
    becomes "1em05", 0.5 becomes "0p5".
    """
    return repr(number).replace("-", "m").replace(".", "p").replace("+", "")


def _short(dtype: str) -> str:
    return {"float32": "f32", "float16": "f16"}[dtype]


@dataclass(frozen=True)
class Fusion:
    """The operations that one kernel computes together with a matrix product: the rows of its input before it
    (prologue), and bias, addition or activation after it (epilogue).
    """

    source: RowSource = Given()
    bias: bool = False
    """True if a float32 bias [n] is added to the results of the product."""
    residual: bool = False
    """True if the results of the product are added to the values that the output already holds."""
    gate: Gate | None = None
    """The activation that turns results, pairs of gate and up, into act(gate) * up; None for other products.
    For prompts, AMX kernels then write the gated values, packed for the next product; in all other cases the
    results are written unchanged.
    """

    def named(self, product: str) -> str:
        """Returns the name of the kernel that computes a matrix product together with this prologue and
        epilogue. product: the kernel's name without them. It stands after the prologue's, and before _bias,
        _add and the gate's activation.
        """
        gate = f"_{self.gate.activation}" if self.gate else ""
        return self.source.name + product + "_bias" * self.bias + "_add" * self.residual + gate
