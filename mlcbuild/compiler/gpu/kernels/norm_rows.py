"""RMSNorm of rows, and the activations of gated feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.storage import Vector
from mlcbuild.compiler.gpu.tensorir import (
    WORKGROUP,
    KernelBuilder,
    Value,
    bind,
    exact,
    kernel,
    local,
    number,
    put,
    reduce_tree,
    strided,
)
from mlcbuild.models import Activation, RmsNorm


@dataclass(frozen=True)
class NormSpec:
    """The norm of rows [n, columns]."""

    columns: int
    norm: RmsNorm
    half: bool
    """Its weight is float16."""


def inverse_root(total: Value, columns: int, eps: float) -> Value:
    """Returns 1 / sqrt(total / columns + eps) of a sum of squares."""
    return bind(number(1) / T.sqrt(total * exact(1 / columns) + exact(eps)))


def weighted(spec: NormSpec, weight: Vector, index: Value) -> Value:
    """Returns the factor of a column."""
    return weight[index] + exact(spec.norm.offset) if spec.norm.offset else weight[index]


def normed_rows(name: str, spec: NormSpec, words: int, first: int) -> KernelBuilder:
    """Returns the kernel y[r] = norm(x[rows[r]]) with rows at inputs[first:first + q]. words: of inputs."""
    with kernel(name) as k:
        x, y = k.buffer("x", (k.size("n"), spec.columns)), k.buffer("y", (k.size("q"), spec.columns))
        inputs = k.buffer("inputs", (words,), "int32")
        weight = Vector.declare(k, "weight", spec.columns, spec.half)
        with k.launch(WORKGROUP, "q") as (row, _, tx):
            source = bind(inputs[first + row])
            total = _sum_of_squares(k, spec, tx, lambda column: x[source, column])
            root = inverse_root(total, spec.columns, spec.norm.eps)

            def store(column: Value) -> None:
                put(y, x[source, column] * root * weighted(spec, weight, column), row, column)

            strided(spec.columns, tx, WORKGROUP, store)
    return k


def norm(name: str, spec: NormSpec) -> KernelBuilder:
    """Returns the kernel y = norm(x)."""
    with kernel(name) as k:
        n = k.size("n")
        x, y = k.buffer("x", (n, spec.columns)), k.buffer("y", (n, spec.columns))
        weight = Vector.declare(k, "weight", spec.columns, spec.half)
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            total = _sum_of_squares(k, spec, tx, lambda column: x[row, column])
            root = inverse_root(total, spec.columns, spec.norm.eps)

            def store(column: Value) -> None:
                put(y, x[row, column] * root * weighted(spec, weight, column), row, column)

            strided(spec.columns, tx, WORKGROUP, store)
    return k


def add_normed(name: str, spec: NormSpec) -> KernelBuilder:
    """Returns the kernel x += norm(delta)."""
    with kernel(name) as k:
        n = k.size("n")
        x, delta = k.buffer("x", (n, spec.columns)), k.buffer("delta", (n, spec.columns))
        weight = Vector.declare(k, "weight", spec.columns, spec.half)
        with k.launch(WORKGROUP, "n") as (row, _, tx):
            total = _sum_of_squares(k, spec, tx, lambda column: delta[row, column])
            root = inverse_root(total, spec.columns, spec.norm.eps)

            def store(column: Value) -> None:
                change = delta[row, column] * root * weighted(spec, weight, column)
                put(x, x[row, column] + change, row, column)

            strided(spec.columns, tx, WORKGROUP, store)
    return k


def _sum_of_squares(k: KernelBuilder, spec: NormSpec, tx: Value, value: object) -> Value:
    own, sums = local(1), k.shared(WORKGROUP)
    put(own, number(0), 0)

    def add(column: Value) -> None:
        each = bind(value(column))  # type: ignore[operator]
        put(own, own[0] + each * each, 0)

    strided(spec.columns, tx, WORKGROUP, add)
    put(sums, own[0], tx)
    reduce_tree(sums, tx, WORKGROUP, lambda left, right: left + right)
    return bind(sums[0])


def activated(activation: Activation, value: Value) -> Value:
    """Returns the activation of a number, by forms that do not overflow."""
    value = bind(value)
    if activation == "silu":
        return value / (number(1) + T.exp(-value))
    cubic = exact(0.044715) * value * value * value
    # tanh(y) = 1 - 2 / (exp(2 y) + 1); drivers' own tanh may overflow
    double = exact(2 * 0.7978845608028654) * (value + cubic)
    tanh = number(1) - number(2) / (T.exp(bind(T.min(double, number(80)))) + number(1))
    return number(0.5) * value * (number(1) + tanh)


def capped(value: Value, cap: float) -> Value:
    """Returns cap * tanh(value / cap)."""
    double = bind(T.max(T.min(value * exact(2 / cap), number(80)), number(-80)))
    return exact(cap) * (number(1) - number(2) / (T.exp(double) + number(1)))


def gated(name: str, size: int, activation: Activation) -> KernelBuilder:
    """Returns the kernel y = activation(pair[:, :size]) * pair[:, size:]."""
    with kernel(name) as k:
        n = k.size("n")
        pair, y = k.buffer("pair", (n, 2 * size)), k.buffer("y", (n, size))
        with k.launch(WORKGROUP, -(-size // WORKGROUP), "n") as (bx, row, tx):
            column = bind(bx * WORKGROUP + tx)
            with T.If(column < size), T.Then():
                gate = activated(activation, pair[row, column])
                put(y, gate * pair[row, size + column], row, column)
    return k
