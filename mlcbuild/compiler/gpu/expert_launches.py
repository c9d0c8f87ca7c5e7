"""Translates a mixture-of-experts layer into kernel launches for a GPU.

In decoding these are the router's product, the choice, one product for the gates of all choices, and one for
their weighted sum. Of the two products of a feed-forward that all tokens share, the first is computed by the
router's launch and the second by that of the sum; with a gate of its own it takes two launches more. Prompts
order their choices by expert first, multiply tiles of rows of one expert, and add up the choices of each row.
Launches are repeated where a device cannot bind the matrices of all experts at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlcbuild_format.program import GUARANTEED, BoundBuffer, Expression, Launch

from mlcbuild.compiler.gpu.emitter import Make
from mlcbuild.compiler.gpu.kernels import expert_choice, expert_rows, norm_rows
from mlcbuild.compiler.gpu.kernels.activations import Gate
from mlcbuild.compiler.gpu.kernels.expert_rows import ExpertsSpec
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.kernels.tile_product import TILE
from mlcbuild.compiler.gpu.launches import Buffers, LaunchBuilder, NormedProduct, bias_of
from mlcbuild.models import Experts, LayerSpec

_ALIGNMENT = 256
"""Required alignment, in bytes, of the offset at which a part of a buffer is bound to a kernel."""


def expert_columns(block: Experts, hidden: int) -> dict[str, int]:
    """Returns workspace buffer name -> number of 32-bit columns per row that a mixture-of-experts layer needs
    in it.
    """
    columns = {
        "router": block.count,
        "routes": 2 * block.chosen,
        "order": block.chosen,
        "expert_pair": 2 * block.size * block.chosen,
        "expert_gated": block.size * block.chosen,
        "expert_out": hidden * block.chosen,
    }
    if block.shared_size:
        columns |= {"pair": 2 * block.shared_size, "gated": block.shared_size}
    if block.shared_gate:
        columns["row_gate"] = 1
    return columns


def most_tiles(block: Experts, rows: Expression) -> Expression:
    """Returns an expression, over the sizes of a GPU program's call, for the maximum number of tiles into
    which the expert choices of `rows` rows are divided; a tile has up to 64 choices, of one expert only.
    rows: a number, or such an expression, for instance "n".
    """
    return ("add", ("div", ("mul", rows, block.chosen), TILE), block.count)


def expert_launches(
    build: LaunchBuilder, base: str, norm_name: str, layer: LayerSpec, rows: int | None
) -> tuple[list[Launch], list[Launch]]:
    """Returns two lists of kernel launches for a mixture-of-experts layer. The first computes experts' gated
    values or, for prompts, their outputs; the second completes the weighted sum and adds it to the residual
    stream. base: prefix of the feed-forward's parameter names; norm_name: prefix of those of the norm before
    it; rows: rows of x per workgroup for the matrix-vector products of decoding; None: launches for prompts.
    """
    block = layer.feed_forward
    assert isinstance(block, Experts)
    before = _inputs(build, base, norm_name, layer, rows)
    choices: dict[str, str | BoundBuffer] = {"logits": "router", "routes": "routes"}
    if block.router.correction:
        choices["correction"] = f"{base}.router.correction"
    before.append(build.launch(expert_choice.route, (block,), {"n": "n"}, choices))
    mixture = _Mixture(build, base, norm_name, layer, rows)
    routed, adding = mixture.prompt() if rows is None else mixture.decode()
    return [*before, *routed], [*adding, *mixture.after()]


def _inputs(
    build: LaunchBuilder, base: str, norm_name: str, layer: LayerSpec, rows: int | None
) -> list[Launch]:
    """Returns the kernel launches of all products of a mixture-of-experts layer with its input, except those
    of the chosen experts: the router's logits and, for a feed-forward that all tokens share, its hidden units
    in the buffer `gated` and its gate in `row_gate`. base, norm_name, layer, rows: those of expert_launches.
    """
    block = layer.feed_forward
    assert isinstance(block, Experts)
    router = f"{base}.router.weight"
    if not block.shared_size:
        return build.normed_product(router, norm_name, layer, rows, "router")
    hidden: dict[str, Any] = {"outputs": block.shared_size, "gate": block.activation}
    out, options = ("pair", {}) if rows is None else ("gated", hidden)
    products = NormedProduct(router, "router"), NormedProduct(f"{base}.shared.gate_up.weight", out, options)
    launches = build.normed_pair(products, norm_name, layer, rows)
    if rows is None:
        buffers, arguments = {"pair": "pair", "y": "gated"}, (block.shared_size, block.activation)
        launches.append(build.launch(norm_rows.gated, arguments, {"n": "n"}, buffers))
    if block.shared_gate:
        name = f"{base}.shared_gate.weight"
        launches += build.normed_product(name, norm_name, layer, rows, "row_gate")
    return launches


@dataclass(frozen=True)
class _StackProduct:
    """A kernel that multiplies rows with the matrices of their experts, which are stored as one stack, and
    what its launches have in common if the stack is bound in parts."""

    make: Make
    stack: str
    """Name of the stack of matrices, one for each expert: "gate_up" or "down"."""
    fields: Mapping[str, Any]
    """Fields of the ProductSpec by name, beside those that follow from the matrices."""
    buffers: Buffers
    """Name of a buffer in the kernel -> buffer of the program, without the matrices and their biases."""
    more: tuple[object, ...] = ()
    """Further arguments of `make`, after the descriptions of the product and of the experts."""


class _Mixture:
    """Builds the kernel launches of one mixture-of-experts layer."""

    def __init__(
        self, build: LaunchBuilder, base: str, norm_name: str, layer: LayerSpec, rows: int | None
    ) -> None:
        block = layer.feed_forward
        assert isinstance(block, Experts)
        self._build, self._base, self._norm_name = build, base, norm_name
        self._layer, self._rows, self._block = layer, rows, block
        self._gate: Gate = block.activation if block.clamp is None else block.clamp
        self._choices: Expression = ("mul", "n", block.chosen)
        stream = "x" if rows is None else build.stream.buffer
        self._to = stream if layer.norms.after is None else "delta"
        self._scale = layer.residual_scale if layer.norms.after is None else 1.0

    def decode(self) -> tuple[list[Launch], list[Launch]]:
        """Returns two lists of kernel launches for the experts of decoding: those that compute the gated
        values of the chosen experts, and those that multiply these with the experts' output matrices and add
        up the weighted results and that of the shared feed-forward. They add the sum, times the layer's
        scale, to the residual stream; if a norm follows the experts, they store it without that factor in the
        buffer `delta` instead."""
        source, norm, norm_buffers = self._build.normed_source(self._norm_name, self._layer, self._rows)
        fused: dict[str, Any] = {"outputs": self._block.size, "gate": self._gate, "norm": norm}
        bound: Buffers = {"x": source, "y": "expert_gated", "routes": "routes", **norm_buffers}
        sizes: dict[str, Expression] = {"n": "n", "choices": self._choices}
        before = self._launches(_StackProduct(expert_rows.expert_gemv, "gate_up", fused, bound), sizes)
        bound = {"x": "expert_gated", "y": self._to, "routes": "routes"}
        fused = {"residual": True, "scale": self._scale}
        rest = first = _StackProduct(expert_rows.expert_sum, "down", fused, bound)
        if self._to == "delta":
            # The sum of several parts of a stack needs an initial value.
            first = replace(first, fields={"scale": self._scale})
        shared = self._shared_in_sum()
        if shared is not None:
            matrix = self._build.matrix(f"{self._base}.shared.down.weight", suffix="2")
            first = replace(first, more=(shared,), buffers={**bound, "gated": "gated", **matrix})
        parts = self._parts("down")
        sums = [self._launch(first, sizes, parts[0])]
        sums += [self._launch(rest, sizes, part) for part in parts[1:]]
        return before, sums if shared is not None else [*sums, *self._shared()]

    def prompt(self) -> tuple[list[Launch], list[Launch]]:
        """Returns two lists of kernel launches for the experts of prompt tokens: those that compute the
        outputs of the chosen experts, and a single one that adds up these outputs, times their weights. It
        adds the sum, times the layer's scale, to the residual stream; if a norm follows the experts, it
        stores the sum without that factor in the buffer `delta` instead."""
        block, hidden = self._block, self._build.config.hidden_size
        sorted_sizes: dict[str, Expression] = {
            "choices": self._choices,
            "tile_count": most_tiles(block, "n"),
        }
        ordered = {"order": "order", "tiles": "tiles"}
        sort = self._build.launch(
            expert_choice.sort_choices, (block,), sorted_sizes, {"routes": "routes", **ordered}
        )
        source, _, _ = self._build.normed_source(self._norm_name, self._layer, None)
        gemm: Make = expert_rows.expert_gemm
        bound = {"x": source, "y": "expert_pair", **ordered}
        product = _StackProduct(gemm, "gate_up", {}, bound, (block.chosen,))
        first = self._launches(product, {"n": "n", **sorted_sizes})
        pair = {"pair": "expert_pair", "y": "expert_gated"}
        gated = self._build.launch(norm_rows.gated, (block.size, self._gate), {"n": self._choices}, pair)
        bound = {"x": "expert_gated", "y": "expert_out", **ordered}
        product = _StackProduct(gemm, "down", {}, bound, (1,))
        second = self._launches(product, {"n": self._choices, **sorted_sizes})
        arguments = (block, hidden, self._scale, self._to == "x")
        bound = {"parts": "expert_out", "routes": "routes", "y": self._to}
        add = self._build.launch(expert_choice.add_choices, arguments, {"n": "n"}, bound)
        return [sort, *first, gated, *second], [add, *self._shared()]

    def _launches(self, product: _StackProduct, sizes: Mapping[str, Expression]) -> list[Launch]:
        """Returns the kernel launches of a product with the matrices of experts: one, or one for each part of
        a stack that is larger than a buffer that a device can bind. sizes: name of a scalar in the kernel ->
        value."""
        return [self._launch(product, sizes, part) for part in self._parts(product.stack)]

    def _launch(
        self, product: _StackProduct, sizes: Mapping[str, Expression], part: tuple[int, int]
    ) -> Launch:
        """Returns the launch that multiplies rows with the matrices of some experts. sizes: name of a scalar
        in the kernel -> value; part: (number of the first expert, number of experts)."""
        (first, count), name = part, f"{self._base}.experts.{product.stack}.weight"
        spec = self._build.product(name, **product.fields)
        matrix = self._build.matrix(name, first * self._build.params[name].shape[1])
        bias = {} if spec.half_bias is None else {"bias": bias_of(name)}
        arguments = (spec, ExpertsSpec(self._block.count, count, self._block.chosen), *product.more)
        bound = {**product.buffers, **bias, **matrix}
        return self._build.launch(product.make, arguments, {**sizes, "first": first}, bound)

    def _parts(self, stack: str) -> list[tuple[int, int]]:
        """Returns (first expert, number of experts) of each part of the experts' matrices `stack`, gate_up or
        down, that is bound in one launch: one part if a device can bind the whole stack.
        """
        name = f"{self._base}.experts.{stack}.weight"
        each, count = self._build.params[name].shape[1], self._block.count
        sizes = [each * row for row in self._build.row_bytes(name)]
        if count * max(sizes) <= self._build.binding_bytes:
            return [(0, count)]
        step = math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, size) for size in sizes))
        most = max(step, self._build.binding_bytes // max(sizes) // step * step)
        return [(first, min(most, count - first)) for first in range(0, count, most)]

    def _shared_in_sum(self) -> ProductSpec | None:
        """Returns the product with the output matrix of the feed-forward that all tokens share, if the kernel
        of decoding that adds up the experts' results can compute it, too. It is None if there is no such
        feed-forward, if it has a gate, or if the kernel would bind more buffers than every device can."""
        if not self._block.shared_size or self._block.shared_gate:
            return None
        shared = self._build.product(f"{self._base}.shared.down.weight")
        experts = self._build.product(f"{self._base}.experts.down.weight")
        # The kernel also binds the choices and the rows of both feed-forwards, but only one output.
        bound = 3 + experts.own_buffers + shared.own_buffers - 1
        return shared if bound <= GUARANTEED.storage_buffers else None

    def _shared(self) -> list[Launch]:
        """Returns a list with the launch that multiplies the hidden units of the feed-forward that all tokens
        share with its output matrix, and adds the result, times the layer's scale, to the residual stream or,
        if a norm follows the experts, without that factor to the buffer `delta`. The list is empty if the
        layer has no shared feed-forward."""
        build, block, name = self._build, self._block, f"{self._base}.shared.down.weight"
        if not block.shared_size:
            return []
        spec = build.product(name, residual=True, scale=self._scale, row_gate=block.shared_gate)
        buffers: dict[str, str | BoundBuffer] = {"x": "gated", "y": self._to}
        if block.shared_gate:
            buffers["row_gate"] = "row_gate"
        return [build.multiply(name, spec, self._rows, buffers)]

    def after(self) -> list[Launch]:
        """Returns a list with the launch that normalizes the experts' result and adds it to the residual
        stream. The list is empty if no norm follows the experts, or if decoding postpones norm and addition
        to the next matrix product."""
        if self._layer.norms.after is None:
            return []
        return self._build.add_normed(f"{self._base}_post_norm", self._layer, self._rows)
