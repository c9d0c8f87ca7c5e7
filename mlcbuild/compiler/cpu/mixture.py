"""Emits a mixture-of-experts layer as calls of kernels: the router, the products with the chosen experts'
matrices, and the feed-forward that all tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op
from tvm.tirx import Expr, PrimFunc

from mlcbuild.compiler.cpu.kernels import expert_gate, expert_product, routing
from mlcbuild.compiler.cpu.kernels.activation import Gate
from mlcbuild.compiler.cpu.kernels.dense import DenseRows
from mlcbuild.compiler.cpu.kernels.exact_product import exact_product
from mlcbuild.compiler.cpu.kernels.expert_product import ExpertMatrices
from mlcbuild.compiler.cpu.kernels.floats import NAME
from mlcbuild.compiler.cpu.kernels.linear import Linear
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Gated
from mlcbuild.compiler.cpu.parts import Parts, dtype_of, float_rows
from mlcbuild.compiler.program.ops import Layer
from mlcbuild.models import Experts

Fed = tuple[Any, Sequence[Tensor]]
"""The input rows of a matrix product: (object that emits the computation of a row inside the product's
kernel, tensors from which the row is computed).
"""
View = Callable[[str, Expr, int], Tensor]
"""Function of (scratch tensor name, rows, columns) that returns the beginning of this scratch tensor as a
float32 [rows, columns] tensor.
"""


@dataclass(frozen=True)
class Mixture:
    """Emits the feed-forward of one layer that is a mixture of experts: router, products with the chosen
    experts' matrices, and the feed-forward that all tokens share, if there is one.
    """

    parts: Parts
    layer: Layer
    view: View

    @property
    def spec(self) -> Experts:
        spec = self.layer.spec.feed_forward
        assert isinstance(spec, Experts)
        return spec

    def optional(self, name: str) -> Sequence[Tensor]:
        """Returns the stored tensors of a parameter of the layer; () if the layer does not have it."""
        return self.layer.weights.get(name, ())

    def linear(self, name: str) -> Linear:
        """Returns a Linear, which names the kernel, quantization scheme and size of the product with the
        layer's matrix `name`; if the parameter holds one matrix per expert, [experts, out, in], of the
        product with one of them.
        """
        param = self.layer.params[name]
        assert param.matrix is not None
        return self.parts.linear(param.name, param.matrix)

    def add(self, source: Fed, out: Tensor, fresh: bool) -> Tensor:
        """Emits a mixture of experts, which adds its result to `out` float32 [n, hidden] in place, and
        returns `out`. source: (object that emits the computation of an input row inside a product's kernel,
        tensors that it reads); one of these tensors may be `out`. fresh: True if `out` is uninitialised, so
        that the result is stored, not added."""
        spec, weights = self.spec, self.layer.weights
        choices = self._route(source)
        n = choices.shape[0]
        pair = self.view("pair", n * spec.chosen, 2 * spec.size)
        first = expert_product.kernel(self._stack("mlp.experts.gate_up.weight"), source[0], False)
        up = weights["mlp.experts.gate_up.weight"]
        pair = into(first, [choices, *source[1], *up], pair)
        shared = self._shared_pair(source, n) if spec.shared_size else None
        gate, inputs = self._gate(pair, choices)
        second = expert_product.kernel(self._stack("mlp.experts.down.weight"), gate, True, fresh)
        out = into(second, [choices, *inputs, *weights["mlp.experts.down.weight"]], out)
        for bias in self.optional("mlp.experts.down.bias"):
            func = expert_gate.add_biases(self.parts.isa, spec, int(out.shape[1]), dtype_of(bias))
            out = into(func, [choices, bias], out)
        return out if shared is None else self._add_shared(shared, out)

    def _stack(self, name: str) -> ExpertMatrices:
        return ExpertMatrices(self.linear(name), self.spec.count, self.spec.chosen)

    def _route(self, source: Fed) -> Tensor:
        """Emits the router, and returns the choices of experts float32 [n, 2 * chosen]: for each row the
        numbers of its experts, ascending, then their weights. source: (object that emits the computation of
        an input row, tensors that it reads).
        """
        spec, weight = self.spec, self.layer.weights["mlp.router.weight"][0]
        n = source[1][0].shape[0]
        logits = self._exact_product(source, weight, self.view("logits", n, spec.count))
        func = routing.route(self.parts.isa, spec)
        extras = [*self.optional("mlp.router.bias"), *self.optional("mlp.router.correction")]
        choices = self.view("choices", n, 2 * spec.chosen)
        places, shapes = [0, len(extras) + 1], [float_rows(*logits.shape), float_rows(*choices.shape)]
        chosen: Tensor = tensor_ir_inplace_op(
            func, str(func.attrs[NAME]), [logits, *extras, choices], places, shapes
        )[1]
        return chosen

    def _exact_product(self, source: Fed, weight: Tensor, out: Tensor) -> Tensor:
        """Emits the product of input rows float32 [n, in] with the unquantized matrix `weight` [out, in] into
        `out`, float32 [n, out], and returns `out`. A row's result has the same bits whatever other rows the
        batch has. source: (object that emits the computation of an input row, tensors that it reads).
        """
        rows, width = (int(size) for size in weight.shape)
        form = DenseRows(self.parts.isa, rows, width, dtype_of(weight))
        func = exact_product(form, Fusion(source[0]))
        return into(func, [*source[1], weight], out)

    def _gate(self, pair: Tensor, choices: Tensor) -> Fed:
        """Returns the input rows of the second matrix product of a mixture of experts, act(gate) * up after
        bias and clamp if the experts have them, as a pair: the object that emits the computation of a row
        inside the product's kernel, and the tensors that it reads.

        pair: float32 [n * chosen, 2 * size], for each chosen expert of each token the values of gate, then
        those of up; choices: float32 [n, 2 * chosen], for each token the numbers of its chosen experts, then
        their weights.
        """
        spec, isa, bias = self.spec, self.parts.isa, self.optional("mlp.experts.gate_up.bias")
        if not bias and spec.clamp is None:
            return Gated(Gate(isa, spec.activation, spec.size), None), [pair]
        dtype = dtype_of(bias[0]) if bias else None
        return expert_gate.ExpertGate(isa, spec, dtype), [pair, *bias, *([choices] if bias else [])]

    def _shared_pair(self, source: Fed, n: Expr) -> Tensor:
        """Emits the first product of the feed-forward that all tokens share, and returns the values of gate,
        then those of up, for each row: float32 [n, 2 * shared_size]. If the layer has a gate for this
        feed-forward, the values of up are already multiplied by the gate's sigmoid. source: (object that
        emits the computation of an input row, tensors that it reads)."""
        spec = self.spec
        pair = self._product(
            "mlp.shared.gate_up.weight", source, self.view("shared", n, 2 * spec.shared_size)
        )
        if spec.shared_gate:
            weight = self.layer.weights["mlp.shared_gate.weight"][0]
            logits = self._exact_product(source, weight, self.view("shared_logit", n, 1))
            pair = into(expert_gate.gate_shared(self.parts.isa, spec.shared_size), [logits], pair)
        return pair

    def _add_shared(self, pair: Tensor, out: Tensor) -> Tensor:
        gate = Gated(Gate(self.parts.isa, self.spec.activation, self.spec.shared_size), None)
        return self._product("mlp.shared.down.weight", (gate, [pair]), out, residual=True)

    def _product(self, name: str, source: Fed, out: Tensor, residual: bool = False) -> Tensor:
        weights: Mapping[str, Sequence[Tensor]] = self.layer.weights
        fusion = Fusion(source[0], residual=residual)
        return self.linear(name).into(out, fusion, source[1], weights[name], self.layer.prompt)


def into(func: PrimFunc, arguments: Sequence[Tensor], out: Tensor) -> Tensor:
    """Emits a call of the kernel `func` with `arguments` and a last argument `out`, which the kernel writes
    or changes in place, and returns `out`.
    """
    name = str(func.attrs[NAME] if NAME in func.attrs else func.attrs["global_symbol"])
    shape = float_rows(*out.shape)
    return tensor_ir_inplace_op(func, name, [*arguments, out], len(arguments), shape)
