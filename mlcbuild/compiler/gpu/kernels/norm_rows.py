"""Emits GPU kernels for norms of rows, RMSNorm and LayerNorm, for copies of rows and for gates of
feed-forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels import activations
from mlcbuild.compiler.gpu.kernels.activations import Gate
from mlcbuild.compiler.gpu.kernels.storage import Vector
from mlcbuild.compiler.gpu.reductions import reduced
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    bind,
    exact,
    floating,
    kernel,
    local,
    number,
    put,
    strided,
    when,
)
from mlcbuild.models import LayerNorm
from mlcbuild.models.layers import Norm


@dataclass(frozen=True)
class NormSpec:
    """The norm of rows with `columns` values, RMSNorm or LayerNorm, as GPU kernels compute it."""

    columns: int
    norm: Norm
    half: bool
    """True if the weight and bias of the norm are stored as float16, False if as float32."""

    @property
    def has_weight(self) -> bool:
        return not isinstance(self.norm, LayerNorm) or self.norm.weight

    @property
    def has_bias(self) -> bool:
        return isinstance(self.norm, LayerNorm) and self.norm.bias

    @property
    def buffers(self) -> int:
        """Returns the number of buffers that a kernel binds for the norm's parameters."""
        return self.has_weight + self.has_bias

    @property
    def is_centred(self) -> bool:
        """Returns True if the norm subtracts a row's mean before it scales the row, as LayerNorm does."""
        return isinstance(self.norm, LayerNorm)


@dataclass(frozen=True)
class NormVectors:
    """The weight and bias of a norm, as buffers of a kernel, None for what the norm lacks."""

    spec: NormSpec
    weight: Vector | None
    bias: Vector | None

    @classmethod
    def declare(
        cls, k: KernelBuilder, spec: NormSpec, names: tuple[str, str] = ("weight", "shift"), size: int = 0
    ) -> NormVectors:
        """Declares the kernel's buffers for a norm's parameters and returns them. names: (name of the weight,
        name of the bias); size: number of values, 0: one for each column.
        """
        size = size or spec.columns
        weight = Vector.declare(k, names[0], size, spec.half) if spec.has_weight else None
        bias = Vector.declare(k, names[1], size, spec.half) if spec.has_bias else None
        return cls(spec, weight, bias)

    def factor(self, index: Value) -> Value | None:
        """Returns the factor by which the norm multiplies the column `index`: its weight plus the norm's
        offset; None if the norm has no weight.
        """
        if self.weight is None:
            return None
        return (
            self.weight[index] + exact(self.spec.norm.offset) if self.spec.norm.offset else self.weight[index]
        )

    def scaled(self, value: Value, index: Value) -> Value:
        """Returns an expression for value * (weight + offset) + bias, with the norm's weight and bias for the
        column `index`; a missing one is left out. value: a number of a row that is already divided by the
        row's root mean square, after subtraction of the mean if the norm is a LayerNorm."""
        factor = self.factor(index)
        value = value if factor is None else value * factor
        return value if self.bias is None else value + self.bias[index]


def inverse_root(total: Value, share: Value, eps: float) -> Value:
    """Returns 1 / sqrt(total * share + eps), the factor by which a norm scales a row. total: the row's sum of
    squares, after subtraction of the mean if the norm subtracts it; share: 1 / number of its values.
    """
    return bind(number(1) / T.sqrt(total * share + exact(eps)))


def normed_rows(name: str, spec: NormSpec, words: int, first: int) -> KernelBuilder:
    """Returns the kernel y[r] = norm(x[rows[r]]) for r in 0 .. q - 1, where rows are the words of the buffer
    `inputs` from `first` on. words: size of `inputs` in 32-bit words.
    """
    with kernel(name) as k:
        x, y = k.buffer("x", (k.size("n"), spec.columns)), k.buffer("y", (k.size("q"), spec.columns))
        inputs = k.buffer("inputs", (words,), "int32")
        vectors = NormVectors.declare(k, spec)
        with k.launch(WORKGROUP, "q") as (row, _, tx):
            source = bind(inputs[first + row])
            columns = (lambda at: x[source, at], lambda at, value: put(y, value, row, at))
            _one_row(k, vectors, tx, columns)
    return k


def norm(name: str, spec: NormSpec) -> KernelBuilder:
    """Returns the kernel that computes y = norm(x) for every row; x and y are float32 [n, columns]."""
    with kernel(name) as k:
        n = k.size("n")
        x, y = k.buffer("x", (n, spec.columns)), k.buffer("y", (n, spec.columns))
        vectors = NormVectors.declare(k, spec)
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            columns = (lambda at: x[row, at], lambda at, value: put(y, value, row, at))
            _one_row(k, vectors, tx, columns)
    return k


def add_normed(name: str, spec: NormSpec, scale: float, apart: bool = False) -> KernelBuilder:
    """Returns the kernel that adds scale * norm(delta) to x in place, for every row. delta and x are its
    buffers, float32 [n, columns]; spec: description of the norm, whose weight and bias are further buffers;
    scale: a constant. apart: True if the sum is stored in the buffer y and x is unchanged.
    """
    with kernel(name) as k:
        n = k.size("n")
        x, delta = k.buffer("x", (n, spec.columns)), k.buffer("delta", (n, spec.columns))
        y = k.buffer("y", (n, spec.columns)) if apart else x
        vectors = NormVectors.declare(k, spec)
        with k.launch(WORKGROUP, "n") as (row, _, tx):

            def add(at: Value, value: Value) -> None:
                put(y, x[row, at] + (value if scale == 1 else value * exact(scale)), row, at)

            _one_row(k, vectors, tx, (lambda at: delta[row, at], add))
    return k


def copy_rows(name: str, columns: int) -> KernelBuilder:
    """Returns the kernel y = x that copies float32 [n, columns]."""
    with kernel(name) as k:
        n = k.size("n")
        x, y = k.buffer("x", (n, columns)), k.buffer("y", (n, columns))
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            strided(columns, tx, WORKGROUP, lambda at: put(y, x[row, at], row, at))
    return k


Columns: TypeAlias = tuple[Callable[[Value], Value], Callable[[Value, Value], None]]
"""Two functions by which a kernel's code accesses a row: one that returns the value in a column, and one of
(column, value) that stores a value there."""


def row_sum(
    k: KernelBuilder, sums: Value, tx: Value, columns: Value | int, value: Callable[[Value], Value]
) -> Value:
    """Emits the sum of value(column) over the columns of a row, which all threads of a workgroup compute
    together, and returns it. The kernel needs a barrier between two uses of the same `sums`. sums: array in
    shared memory with one number per thread; tx: index of the thread.
    """
    partial = local(1)
    put(partial, number(0), 0)
    with T.serial((columns + WORKGROUP - 1) // WORKGROUP) as step:
        column = bind(step * WORKGROUP + tx)
        with when(column < columns):
            put(partial, partial[0] + bind(value(column)), 0)
    (total,) = reduced(k, [partial[0]], [sums], (tx, WORKGROUP), "add")
    return total


def row_statistics(
    k: KernelBuilder,
    spec: NormSpec,
    tx: Value,
    read: Callable[[Value], Value],
    count: Value | None = None,
) -> tuple[Value | None, Value]:
    """Emits code that computes the statistics of a row for a norm. Returns two expressions: the mean, or None
    if the norm does not subtract it, and 1 / sqrt(mean square + eps), with the mean square of the differences
    from the mean if there is one. read: function from a column to the number there; count: number of values
    in the row; None: the norm's number of columns."""
    columns = spec.columns if count is None else count
    share = exact(1 / spec.columns) if count is None else bind(number(1) / floating(count))
    mean = None
    if spec.is_centred:
        mean = bind(row_sum(k, k.shared(WORKGROUP), tx, columns, read) * share)

    def square(column: Value) -> Value:
        value = bind(read(column) if mean is None else read(column) - mean)
        return value * value

    total = row_sum(k, k.shared(WORKGROUP), tx, columns, square)
    return mean, inverse_root(total, share, spec.norm.eps)


def _one_row(k: KernelBuilder, vectors: NormVectors, tx: Value, columns: Columns) -> None:
    """Emits code that normalizes one row, which all threads of a workgroup compute together. vectors: the
    norm with its weight and bias; tx: index of the thread; columns: (function that returns the value in a
    column, function of (column, normalized value) that stores it)."""
    read, write = columns
    mean, root = row_statistics(k, vectors.spec, tx, read)

    def store(column: Value) -> None:
        value = read(column) if mean is None else read(column) - mean
        write(column, vectors.scaled(value * root, column))

    strided(vectors.spec.columns, tx, WORKGROUP, store)


def gated(name: str, size: int, gate: Gate) -> KernelBuilder:
    """Returns the kernel y = gate(pair[:, :size], pair[:, size:]), which applies the gated activation of a
    feed-forward to rows that hold `size` values of gate, then as many of up.
    """
    with kernel(name) as k:
        n = k.size("n")
        pair, y = k.buffer("pair", (n, 2 * size)), k.buffer("y", (n, size))
        with k.launch(WORKGROUP, -(-size // WORKGROUP), "n") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            with when(column < size):
                value = activations.gated(gate, pair[row, column], pair[row, size + column])
                put(y, value, row, column)
    return k
