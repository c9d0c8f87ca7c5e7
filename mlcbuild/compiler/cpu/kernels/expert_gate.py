"""Emits the gated activation of experts that have biases or a clamp, and the addition of biases to experts'
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.activation import SERIAL_ROWS, activate
from mlcbuild.compiler.cpu.kernels.floats import Floats, kernel, over_rows, scratch, size_var
from mlcbuild.compiler.cpu.kernels.vectors import argument, i64
from mlcbuild.models import Clamp, Experts


@dataclass(frozen=True)
class ExpertGate:
    """The prologue (code in front of a matrix product) of the experts' second product: it computes act(gate)
    * up from float32 [pairs, 2 * size], gates first, with a row for each pair (token, chosen expert). With a
    clamp of `limit` and `alpha` it computes (up + 1) * gate * sigmoid(alpha * gate), with gates of at most
    `limit` and ups from -limit to limit.

    If there are biases, of type `dtype` and shape [experts, 2 * size], they are added to gates and ups first,
    and the kernel also takes the choices of experts, float32 [n, 2 * chosen]: for each token the numbers of
    its experts, then their weights.
    """

    isa: ISA
    spec: Experts
    dtype: str | None
    packed = False

    @property
    def name(self) -> str:
        """Returns the first part of the names of kernels that compute a gated activation before their
        product, such as "silu_bias_" for SiLU with biases, or "clamped_" for clamped gates and ups.
        """
        gate = "clamped" if self.spec.clamp else self.spec.activation
        return f"{gate}_bias_" if self.dtype else f"{gate}_"

    def arguments(self, m: Expr, k: int) -> tuple[Buffer, ...]:
        """Declares the kernel's arguments and returns their buffers: float32 [m, 2 * k], k gates and then k
        ups of each pair (token, chosen expert); if there are biases, also the biases [experts, 2 * k] and the
        choices float32 [n, 2 * chosen], for each token the numbers of its experts and then their weights.
        """
        pair = argument("gate_up", (m, 2 * k), "float32")
        if self.dtype is None:
            return (pair,)
        bias = argument("bias", (self.spec.count, 2 * k), self.dtype)
        return pair, bias, argument("bias_choices", (T.int64(), 2 * self.spec.chosen), "float32")

    def row(self, inputs: Sequence[Buffer], row: Expr) -> tuple[Buffer, Expr]:
        """Emits code that computes act(gate) * up for one pair (token, chosen expert), or with a clamp (up +
        1) * gate * sigmoid(alpha * gate), and returns (buffer float32 [1, size] that holds the result, index
        0 of its row). inputs: float32 [pairs, 2 * size] with gates, then ups; if the experts have biases,
        also the biases and the buffer of each token's chosen experts. row: index of the pair."""
        size = self.spec.size
        floats, line = Floats.dividing(self.isa, size), scratch((1, size))
        expert = None if self.dtype is None else _expert(inputs[2], self.spec.chosen, row)

        def read(at: Expr) -> Expr:
            value = floats.load(inputs[0], row, at)
            return T.bind(value if expert is None else value + floats.load(inputs[1], expert, at))

        with T.serial(size // floats.lanes) as k:
            at = k * floats.lanes
            floats.store(line, self._gated(floats, read(at), read(at + size)), T.int64(0), at)
        return line, T.int64(0)

    def _gated(self, floats: Floats, gate: Expr, up: Expr) -> Expr:
        clamp: Clamp | None = self.spec.clamp
        if clamp is None:
            return activate(floats, self.spec.activation, gate) * up
        limit = floats.constant(clamp.limit)
        gate = T.bind(T.min(gate, limit))
        up = T.max(T.min(up, limit), floats.constant(-clamp.limit))
        return (up + floats.constant(1.0)) * gate * floats.sigmoid(gate * floats.constant(clamp.alpha))


def _expert(choices: Buffer, chosen: int, pair: Expr) -> Expr:
    expert = choices[T.truncdiv(pair, i64(chosen)), T.truncmod(pair, i64(chosen))]
    return T.bind(T.Cast("int64", expert))


def add_biases(isa: ISA, spec: Experts, hidden: int, dtype: str) -> PrimFunc:
    """Returns the kernel (choices float32 [n, 2 * chosen], bias [experts, hidden], x float32 [n, hidden] in
    place) that adds to each row of x the biases of its chosen experts, times the experts' weights. A row of
    `choices` holds the experts' numbers and then their weights. dtype: stored type of the biases.
    """
    floats = Floats.dividing(isa, hidden)
    with kernel("expert_bias_add") as built:
        rows = size_var("n")
        choices = built.tensor("choices", (rows, 2 * spec.chosen))
        bias = built.tensor("bias", (spec.count, hidden), dtype)
        x = built.tensor("x", (rows, hidden))

        def one_row(row: Expr) -> None:
            with T.serial(spec.chosen) as choice:
                expert = T.bind(T.Cast("int64", choices[row, choice]))
                weight = floats.spread(T.bind(choices[row, spec.chosen + choice]))
                with T.serial(hidden // floats.lanes) as k:
                    at = k * floats.lanes
                    bias_values = T.bind(floats.load(bias, expert, at))
                    floats.store(x, floats.fma(bias_values, weight, floats.load(x, row, at)), row, at)

        with built.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return built.func


def gate_shared(isa: ISA, size: int) -> PrimFunc:
    """Returns the kernel (logits float32 [n, 1], pair float32 [n, 2 * size] in place) that multiplies the
    second half of each row of `pair`, the up projection of the shared expert, by sigmoid(logit).

    This gates the shared expert's results, because its down projection is linear.
    """
    floats = Floats.dividing(isa, size)
    with kernel("gate_shared") as built:
        rows = size_var("n")
        logits = built.tensor("logits", (rows, 1))
        pair = built.tensor("pair", (rows, 2 * size))

        def one_row(row: Expr) -> None:
            share = floats.spread(T.bind(floats.scalar.sigmoid(T.bind(logits[row, 0]))))
            with T.serial(size // floats.lanes) as k:
                at = size + k * floats.lanes
                floats.store(pair, floats.load(pair, row, at) * share, row, at)

        with built.body():
            over_rows(rows, SERIAL_ROWS, one_row)
    return built.func
