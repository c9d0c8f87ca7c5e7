"""Emits activation functions and soft caps in GPU kernels, in forms that do not overflow."""

from __future__ import annotations

import math
from typing import TypeAlias

from tvm.script.ir_builder import tirx as T

from mlcbuild.compiler.gpu.kernels.storage import Vector
from mlcbuild.compiler.gpu.tensorir import Value, bind, either, exact, number
from mlcbuild.models import Activation
from mlcbuild.models.experts import Clamp

Gate: TypeAlias = Activation | Clamp
"""The function by which a gated feed-forward combines gate and up: an activation of the gate times up, or
gpt-oss's clamped gate.
"""
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def activated(activation: Activation, value: Value, scalars: Vector | None = None) -> Value:
    """Returns the expression of an activation function of one float32 number. scalars: the buffer of xIELU's
    parameters (alpha_p, alpha_n, beta, eps), for that activation only.
    """
    value = bind(value)
    if activation == "silu":
        return value * sigmoid(value)
    if activation == "relu":
        return T.max(value, number(0))
    if activation == "relu2":
        above = bind(T.max(value, number(0)))
        return above * above
    if activation == "gelu":
        return number(0.5) * value * (number(1) + _erf(bind(value * exact(math.sqrt(0.5)))))
    if activation == "xielu":
        assert scalars is not None
        return _xielu(value, scalars)
    cubic = exact(0.044715) * value * value * value
    # tanh(y) = 1 - 2 / (exp(2 y) + 1); the tanh of drivers may overflow
    double = exact(2 * 0.7978845608028654) * (value + cubic)
    tanh = number(1) - number(2) / (T.exp(bind(T.min(double, number(80)))) + number(1))
    return number(0.5) * value * (number(1) + tanh)


def gated(gate: Gate, left: Value, right: Value) -> Value:
    """Returns the expression by which a gated feed-forward combines one gate (`left`) and one up (`right`):
    activation(gate) * up, or the clamped gate of gpt-oss, g * sigmoid(alpha * g) * (u + 1) with g = min(gate,
    limit) and u = up limited to -limit .. limit. gate: name of the activation, or the Clamp with alpha and
    limit.
    """
    if not isinstance(gate, Clamp):
        return activated(gate, left) * right
    limit = exact(gate.limit)
    left = bind(T.min(left, limit))
    right = bind(T.max(T.min(right, limit), -limit))
    return (right + number(1)) * left * sigmoid(bind(exact(gate.alpha) * left))


def sigmoid(value: Value) -> Value:
    return number(1) / (number(1) + T.exp(bind(T.min(-value, number(80)))))


def capped(value: Value, cap: float) -> Value:
    """Returns the expression cap * tanh(value / cap), a soft cap of one float32 number."""
    double = bind(T.max(T.min(value * exact(2 / cap), number(80)), number(-80)))
    return exact(cap) * (number(1) - number(2) / (T.exp(double) + number(1)))


def _erf(value: Value) -> Value:
    """Returns an expression of the error function of one float32 number, with an absolute error of 1.5e-7:
    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    size = bind(T.max(value, -value))
    t = bind(number(1) / (number(1) + exact(0.3275911) * size))
    total = number(0)
    for coefficient in reversed(_ERF):
        total = (total + exact(coefficient)) * t
    tail = bind(number(1) - total * T.exp(-size * size))
    return either(value < number(0), -tail, tail)


def _xielu(value: Value, scalars: Vector) -> Value:
    alpha_p, alpha_n, beta, eps = (bind(scalars[index]) for index in range(4))
    above = bind(value * value * _softplus(alpha_p))
    below = bind((T.exp(bind(T.min(value, eps))) - number(1) - value) * (beta + _softplus(alpha_n)))
    return either(value > number(0), above, below) + beta * value


def _softplus(value: Value) -> Value:
    """Returns an expression of log(1 + exp(value)) in a form that does not overflow."""
    size = bind(T.max(value, -value))
    return T.max(value, number(0)) + T.log(number(1) + T.exp(-size))
