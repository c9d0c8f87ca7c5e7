"""Translates a mixture-of-experts layer into kernel launches for a GPU.

In decoding these are the router's product, the choice, one product for the gates of all choices, and one for
their weighted sum. Prompts order their choices by expert first, multiply tiles of rows of one expert, and add
up the choices of each row. Launches are repeated where a device cannot bind the matrices of all experts at
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlcbuild_format.program import BoundBuffer, Expression, Launch

from mlcbuild.compiler.gpu.emitter import Make
from mlcbuild.compiler.gpu.kernels import expert_choice, expert_rows, norm_rows
from mlcbuild.compiler.gpu.kernels.activations import Gate
from mlcbuild.compiler.gpu.kernels.expert_rows import ExpertsSpec
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.kernels.tile_product import TILE
from mlcbuild.compiler.gpu.launches import Buffers, LaunchBuilder, bias_of
from mlcbuild.models import Experts, LayerSpec

_ALIGNMENT = 256
"""Required alignment, in bytes, of the offset at which a part of a buffer is bound to a kernel."""


def expert_columns(block: Experts, hidden: int) -> dict[str, int]:
    """Returns workspace buffer name -> number of 32-bit columns per row that a mixture-of-experts layer needs
    in it.
    """
    columns = {
        "router": block.count,
        "routes": block.chosen,
        "shares": block.chosen,
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
    router = build.normed_product(f"{base}.router.weight", norm_name, layer, rows, "router")
    choices: dict[str, str | BoundBuffer] = {"logits": "router", "routes": "routes", "shares": "shares"}
    if block.router.correction:
        choices["correction"] = f"{base}.router.correction"
    before = [*router, build.launch(expert_choice.route, (block,), {"n": "n"}, choices)]
    mixture = _Mixture(build, base, norm_name, layer, rows)
    routed, adding = mixture.prompt() if rows is None else mixture.decode()
    shared, added = mixture.shared()
    return [*before, *routed, *shared], [*adding, *added, *mixture.after()]


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
        up the weighted results. They add the sum, times the layer's scale, to the residual stream; if a norm
        follows the experts, they store it without that factor in the buffer `delta` instead."""
        block, layer, norm_name = self._block, self._layer, self._norm_name
        source, norm, norm_buffers = self._build.normed_source(norm_name, layer, self._rows)
        fused = {"outputs": block.size, "gate": self._gate, "norm": norm}
        sizes: dict[str, Expression] = {"n": "n", "choices": self._choices}
        bound = {"x": source, "y": "expert_gated", "routes": "routes", **norm_buffers}
        first = self._products(expert_rows.expert_gemv, ("gate_up", fused, ()), sizes, bound)
        bound = {"x": "expert_gated", "y": self._to, "routes": "routes", "shares": "shares"}
        # The sum of several parts of a stack needs an initial value.
        sums = {"residual": True, "scale": self._scale}
        second = self._products(expert_rows.expert_sum, ("down", sums, ()), sizes, bound)
        if self._to == "delta":
            second[0] = self._products(
                expert_rows.expert_sum, ("down", {"scale": self._scale}, ()), sizes, bound
            )[0]
        return first, second

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
        gemm, bound = expert_rows.expert_gemm, {"x": source, "y": "expert_pair", **ordered}
        first = self._products(gemm, ("gate_up", {}, (block.chosen,)), {"n": "n", **sorted_sizes}, bound)
        pair = {"pair": "expert_pair", "y": "expert_gated"}
        gated = self._build.launch(norm_rows.gated, (block.size, self._gate), {"n": self._choices}, pair)
        bound = {"x": "expert_gated", "y": "expert_out", **ordered}
        sizes = {"n": self._choices, **sorted_sizes}
        second = self._products(gemm, ("down", {}, (1,)), sizes, bound)
        arguments = (block, hidden, self._scale, self._to == "x")
        bound = {"parts": "expert_out", "shares": "shares", "y": self._to}
        add = self._build.launch(expert_choice.add_choices, arguments, {"n": "n"}, bound)
        return [sort, *first, gated, *second], [add]

    def _products(
        self,
        make: Make,
        product: tuple[str, Mapping[str, Any], tuple[object, ...]],
        sizes: Mapping[str, Expression],
        buffers: Buffers,
    ) -> list[Launch]:
        """Returns the kernel launches that multiply rows with the matrices of their experts, which are stored
        as one stack. If the stack is larger than a buffer that a device can bind, it is divided, with one
        launch for each part.

        make: function that builds the kernel; product: (name of the stack, such as gate_up; fields of its
        ProductSpec by name; further arguments of `make`); sizes: name of a scalar in the kernel -> value;
        buffers: name of a buffer in the kernel -> buffer of the program. The launches differ only in the part
        of the stack that they bind, and in the number of its first expert.
        """
        part, fields, more = product
        name, launches = f"{self._base}.experts.{part}.weight", []
        spec: ProductSpec = self._build.product(name, **fields)
        each = self._build.params[name].shape[1]
        if spec.half_bias is not None:
            buffers = {**buffers, "bias": bias_of(name)}
        for first, count in self._parts(name):
            experts = ExpertsSpec(self._block.count, count, self._block.chosen)
            bound = {**buffers, **self._build.matrix(name, first * each)}
            launches.append(
                self._build.launch(make, (spec, experts, *more), {**sizes, "first": first}, bound)
            )
        return launches

    def _parts(self, name: str) -> list[tuple[int, int]]:
        """Returns (first expert, number of experts) of each part of the parameter `name`, a stack of
        matrices, that is bound in one launch: one part if a device can bind the whole stack.
        """
        each, count = self._build.params[name].shape[1], self._block.count
        sizes = [each * row for row in self._build.row_bytes(name)]
        if count * max(sizes) <= self._build.binding_bytes:
            return [(0, count)]
        step = math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, size) for size in sizes))
        most = max(step, self._build.binding_bytes // max(sizes) // step * step)
        return [(first, min(most, count - first)) for first in range(0, count, most)]

    def shared(self) -> tuple[list[Launch], list[Launch]]:
        """Returns two lists of kernel launches of the shared feed-forward, which every token uses: those that
        compute its gated values, and those that multiply them with its output matrix. The second ones add the
        result, times the layer's scale, to the residual stream or, if a norm follows the experts, without
        that factor to the buffer `delta`. Both lists are empty if the layer has no shared feed-forward."""
        build, block, base, rows = self._build, self._block, f"{self._base}.shared", self._rows
        if not block.shared_size:
            return [], []
        launches, norm_name, layer = [], self._norm_name, self._layer
        if block.shared_gate:
            name = f"{self._base}.shared_gate.weight"
            launches += build.normed_product(name, norm_name, layer, rows, "row_gate")
        name = f"{base}.gate_up.weight"
        if rows is None:
            launches += build.normed_product(name, norm_name, layer, rows, "pair")
            pair = {"pair": "pair", "y": "gated"}
            gated = (block.shared_size, block.activation)
            launches.append(build.launch(norm_rows.gated, gated, {"n": "n"}, pair))
        else:
            fused: dict[str, Any] = {"outputs": block.shared_size, "gate": block.activation}
            launches += build.normed_product(name, norm_name, layer, rows, "gated", **fused)
        spec = build.product(
            f"{base}.down.weight", residual=True, scale=self._scale, row_gate=block.shared_gate
        )
        buffers: dict[str, str | BoundBuffer] = {"x": "gated", "y": self._to}
        if block.shared_gate:
            buffers["row_gate"] = "row_gate"
        return launches, [build.multiply(f"{base}.down.weight", spec, rows, buffers)]

    def after(self) -> list[Launch]:
        """Returns a list with the launch that normalizes the experts' result and adds it to the residual
        stream. The list is empty if no norm follows the experts, or if decoding postpones norm and addition
        to the next matrix product."""
        if self._layer.norms.after is None:
            return []
        return self._build.add_normed(f"{self._base}_post_norm", self._layer, self._rows)
