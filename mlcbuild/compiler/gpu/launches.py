"""Builds the kernel launches of which layers consist on a GPU: norms, matrix products, and products after
norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mlcbuild_format.limits import Limits
from mlcbuild_format.program import GUARANTEED, BoundBuffer, Expression, Launch

from mlcbuild import quant
from mlcbuild.compiler.gpu.call_sizes import CallSizes
from mlcbuild.compiler.gpu.emitter import Emitter, Make
from mlcbuild.compiler.gpu.kernels import norm_rows, product, product_pair, tile_product
from mlcbuild.compiler.gpu.kernels.norm_rows import NormSpec
from mlcbuild.compiler.gpu.kernels.packed_product import can_pack
from mlcbuild.compiler.gpu.kernels.product import ProductSpec
from mlcbuild.compiler.gpu.kernels.product_pair import can_pair
from mlcbuild.compiler.gpu.kernels.storage import stored_as
from mlcbuild.compiler.gpu.residual_stream import OTHER, PendingSum, ResidualStream, can_add
from mlcbuild.models import LayerSpec, ModelConfig, Param, parameters
from mlcbuild.models.layers import Norm
from mlcbuild.quant import Storage

Buffers = Mapping[str, str | BoundBuffer]
PLAIN = {"float32": stored_as("f32"), "float16": stored_as("f16")}
"""Dtype of an unquantized matrix -> StoredAs, its description for GPU kernels."""


@dataclass(frozen=True)
class NormedProduct:
    """A product norm(x) W^T with the residual stream x, in decoding or for prompts."""

    name: str
    """Name of the parameter that is the matrix W of the product, such as layers.0.attn.q.weight."""
    out: str
    """Name of the program's buffer to which the results of the product are written."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the ProductSpec, the description of the product, by name."""


@dataclass(frozen=True)
class LaunchBuilder:
    """Builds kernel launches for one model's GPU program. `emitter` collects the kernels that they need,
    `stream` records which buffer holds the residual stream.
    """

    config: ModelConfig
    scheme: Storage
    limits: Limits
    binding_bytes: int = GUARANTEED.binding_bytes
    """Maximum bytes of a buffer that a kernel may bind; larger matrices are bound in parts."""
    emitter: Emitter = field(default_factory=Emitter)
    stream: ResidualStream = field(default_factory=ResidualStream)

    @cached_property
    def params(self) -> Mapping[str, Param]:
        return {param.name: param for param in parameters(self.config)}

    @cached_property
    def calls(self) -> CallSizes:
        return CallSizes(self.config.vocab_size, self.limits)

    def launch(
        self, make: Make, arguments: tuple[object, ...], scalars: Mapping[str, Expression], buffers: Buffers
    ) -> Launch:
        """Returns a launch of the GPU kernel that `make(name, *arguments)` builds; equal arguments share one
        kernel. scalars: name in the kernel -> value, where names that the kernel lacks are ignored; buffers:
        name in the kernel -> name of a buffer of the program, or BoundBuffer for a part of one. Raises
        CompileError if the kernel does not use one of its buffers, if it has a scalar that is not passed, or
        if it has other buffers than those passed; TVM's exceptions pass unchanged."""
        return self.emitter.launch(self.emitter.kernel(make, *arguments), scalars, buffers)

    def is_half(self, name: str) -> bool:
        """Returns True if the unquantized parameter `name` is stored as float16."""
        return quant.plain_dtype(self.params[name], quant.scheme_for(self.scheme, name)) == "float16"

    def norm(self, name: str, spec: Norm, columns: int) -> NormSpec:
        """Returns a NormSpec, from which GPU kernels of a norm are built, for rows with `columns` values.
        name: prefix of the names of the norm's parameters, to which .weight and .bias are added; spec: the
        model's description of the norm, an RMSNorm or a LayerNorm, which may lack weight or bias."""
        weight = f"{name}.weight"
        return NormSpec(columns, spec, weight in self.params and self.is_half(weight))

    def norm_buffers(
        self, name: str, spec: NormSpec, bindings: tuple[str, str] = ("weight", "shift")
    ) -> dict[str, str | BoundBuffer]:
        """Returns buffer name in a kernel -> parameter name, for the weight and the bias that a norm has.
        name: prefix of the parameters' names; bindings: the names in the kernel of (weight, bias).
        """
        buffers: dict[str, str | BoundBuffer] = {}
        if spec.has_weight:
            buffers[bindings[0]] = f"{name}.weight"
        if spec.has_bias:
            buffers[bindings[1]] = f"{name}.bias"
        return buffers

    def matrix(self, name: str, first: int = 0, suffix: str = "") -> dict[str, BoundBuffer]:
        """Returns the buffers by which a kernel reads the matrix `name` from row `first` on: buffer name in
        the kernel, "w" for weights and, only if they are quantized, "s" for their scales, each followed by
        `suffix` -> BoundBuffer (name of the stored tensor, offset in bytes)."""
        rows = self.rows(name)
        stored = quant.stored(self.params[name], self.scheme)
        return {
            binding + suffix: BoundBuffer(tensor.name, first * (tensor.size // rows))
            for binding, tensor in zip(("w", "s"), stored, strict=False)
        }

    def rows(self, name: str) -> int:
        """Returns the number of rows of the matrix parameter `name`; if it holds several matrices, such as
        one for each expert, of all of them together.
        """
        *rows, _ = self.params[name].shape
        return rows[0] if len(rows) == 1 else rows[0] * rows[1]

    def row_bytes(self, name: str) -> list[int]:
        """Returns, for each stored tensor of a matrix (codes, scales), the number of bytes that one row takes
        in it.
        """
        stored = quant.stored(self.params[name], self.scheme)
        return [tensor.size // self.rows(name) for tensor in stored]

    def parts(self, name: str) -> list[tuple[int, int]]:
        """Returns (first row, number of rows) of each part of the matrix `name` that kernels bind separately;
        there is one part unless a stored tensor of the matrix has more than `binding_bytes`. Parts begin at
        multiples of 128 rows."""
        rows = self.rows(name)
        row = max(self.row_bytes(name))
        if rows * row <= self.binding_bytes:
            return [(0, rows)]
        # A multiple of 128 rows begins at a multiple of 256 bytes.
        count = max(128, self.binding_bytes // row // 128 * 128)
        return [(first, min(count, rows - first)) for first in range(0, rows, count)]

    def product(self, name: str, bias: str | None = None, **options: Any) -> ProductSpec:
        """Returns a ProductSpec, from which GPU kernels of the product with the matrix `name` are built.
        bias: the parameter that holds its bias, by default the one named like the matrix; without such a
        parameter there is no bias; options: further fields of the ProductSpec.
        """
        storage, param = quant.scheme_for(self.scheme, name), self.params[name]
        rows, columns = param.shape[-2:]
        form = stored_as(storage.format) if param.matrix else PLAIN[quant.plain_dtype(param, storage)]
        spec = ProductSpec(
            *(rows, columns, form),
            rounds_inputs=bool(param.matrix) and storage.activation_bits == 8 and can_pack(form),
            half_tiles=form.bits > 0 and storage.dtype == "float16",
        )
        bias = bias or bias_of(name)
        if bias in self.params:
            spec = replace(spec, half_bias=self.is_half(bias))
        return replace(spec, **options)

    def multiply(
        self, name: str, spec: ProductSpec, rows: int | None, buffers: Buffers, size: Expression = "n"
    ) -> Launch:
        """Returns the Launch of a kernel that computes y = x W^T with the matrix `name`, or with a part of it
        that begins at row spec.first. spec: operations fused with the product; rows: rows of x per workgroup
        for a matrix-vector kernel (GEMV), or None for a GEMM; size: number of rows of x; buffers: name in the
        kernel -> buffer of the program, for x, y and fused operations; the method binds W, its bias and
        the parameters of xIELU."""
        bound: dict[str, str | BoundBuffer] = {**self._operands(name, spec), **buffers}
        make: Make = tile_product.gemm if rows is None else product.gemv
        arguments = (spec,) if rows is None else (spec, rows)
        return self.launch(make, arguments, {"n": size}, bound)

    def _operands(self, name: str, spec: ProductSpec, suffix: str = "") -> dict[str, str | BoundBuffer]:
        """Returns buffer name in a kernel, followed by `suffix` -> stored tensor of the program, for the
        matrix `name` of a product from row spec.first on, its bias and its parameters of xIELU."""
        bound: dict[str, str | BoundBuffer] = {**self.matrix(name, spec.first, suffix)}
        if spec.half_bias is not None:
            bound[f"bias{suffix}"] = bias_of(name)
        if spec.activation == "xielu":
            bound[f"xielu{suffix}"] = name.removesuffix("up.weight") + "xielu"
        return bound

    def normed(self, norm_name: str, layer: LayerSpec, rows: int | None) -> list[Launch]:
        """Returns the kernel launch that writes the norm of the residual stream `x` to the buffer `normed`
        for prompts (rows is None), as a list. It is [] for a layer without norms before attention and
        feed-forward, and for decoding, where the matrix products that read x normalize it. norm_name: prefix
        of the names of the norm's parameters."""
        if rows is not None or layer.norms.before is None:
            return []
        before = self.norm(norm_name, layer.norms.before, self.config.hidden_size)
        buffers = {"x": "x", "y": "normed", **self.norm_buffers(norm_name, before)}
        return [self.launch(norm_rows.norm, (before,), {"n": "n"}, buffers)]

    def normed_source(
        self, norm_name: str, layer: LayerSpec, rows: int | None
    ) -> tuple[str, NormSpec | None, Buffers]:
        """Returns where the kernel of a matrix product reads norm(x), x being the residual stream, as three
        values: the name of its input buffer; the norm that the kernel must compute, or None if the buffer
        holds what the product needs; and name of a buffer in the kernel -> name of a parameter of that norm.
        rows: rows of x per workgroup in decoding; None: for prompts, whose norm is computed by a launch of
        its own."""
        if layer.norms.before is None:
            return "x" if rows is None else self.stream.buffer, None, {}
        if rows is None:
            return "normed", None, {}
        norm = self.norm(norm_name, layer.norms.before, self.config.hidden_size)
        return self.stream.buffer, norm, self.norm_buffers(norm_name, norm)

    def normed_product(
        self, name: str, norm_name: str, layer: LayerSpec, rows: int | None, out: str, **options: Any
    ) -> list[Launch]:
        """Returns the kernel launches that compute norm(x) W^T, where x is the residual stream, into the
        buffer `out`. In decoding, a sum whose addition to x was postponed is added first, by the same kernel
        if possible, and `self.stream` records the buffer that then holds x.

        name: name of the matrix W; norm_name: prefix of the names of the norm's parameters; rows: rows of x
        per workgroup in decoding; None: launches for prompts, which read norm(x) from the buffer `normed`, to
        which a launch of the method `normed` must have written it, or x itself if the layer has no norm
        there; options: further fields of the ProductSpec, the description of the product."""
        _, norm, _ = self.normed_source(norm_name, layer, rows)
        spec, first = self.product(name, norm=norm, **options), list[Launch]()
        pending, added = self.stream.pending if rows is not None else None, dict[str, str | BoundBuffer]()
        if pending is not None and can_add(pending, spec):
            spec = replace(spec, added=pending.norm, added_scale=pending.scale)
        elif pending is not None:
            first, pending = self.settle(), None
        source, _, buffers = self.normed_source(norm_name, layer, rows)
        if pending is not None:
            after = self.norm_buffers(pending.name, pending.norm, ("post_weight", "post_shift"))
            self.stream.buffer, self.stream.pending = OTHER[source], None
            added = {"delta": "delta", "sum": self.stream.buffer, **after}
        return [*first, self.multiply(name, spec, rows, {"x": source, "y": out, **buffers, **added})]

    def normed_pair(
        self,
        products: tuple[NormedProduct, NormedProduct],
        norm_name: str,
        layer: LayerSpec,
        rows: int | None,
    ) -> list[Launch]:
        """Returns the kernel launches that compute norm(x) W^T for two matrices W, where x is the residual
        stream: in decoding one launch, if every device can bind the buffers of its kernel and no sum is still
        to be added to x, else the launches of the method normed_product for each.

        norm_name: prefix of the names of the norm's parameters; rows: rows of x per workgroup in decoding;
        None: launches for prompts."""
        source, norm, buffers = self.normed_source(norm_name, layer, rows)
        first, second = (self.product(each.name, norm=norm, **each.options) for each in products)
        if rows is None or self.stream.pending is not None or not can_pair(first, second):
            return [
                launch
                for each in products
                for launch in self.normed_product(each.name, norm_name, layer, rows, each.out, **each.options)
            ]
        bound: dict[str, str | BoundBuffer] = {"x": source, **buffers}
        for each, spec, suffix in zip(products, (first, second), ("", "2"), strict=True):
            bound |= {f"y{suffix}": each.out, **self._operands(each.name, spec, suffix)}
        return [self.launch(product_pair.gemv_pair, (first, second, rows), {"n": "n"}, bound)]

    def residual_product(
        self, name: str, post_name: str, layer: LayerSpec, rows: int | None, source: str
    ) -> list[Launch]:
        """Returns the kernel launches that add scale * source W^T to the residual stream x, with the layer's
        scale, or scale * norm(source W^T) if the layer has a norm there. In decoding, such a norm and its
        addition are postponed to the next matrix product if feed-forward runs after attention, not parallel
        to it; `self.stream.pending` then records them.

        name: name of the matrix W; post_name: prefix of the names of the norm's parameters; rows: rows of x
        per workgroup in decoding; None: launches for prompts; source: name of the buffer that is multiplied.
        """
        if layer.norms.after is None:
            spec = self.product(name, residual=True, scale=layer.residual_scale)
            out = "x" if rows is None else self.stream.buffer
            return [self.multiply(name, spec, rows, {"x": source, "y": out})]
        first = self.multiply(name, self.product(name), rows, {"x": source, "y": "delta"})
        return [first, *self.add_normed(post_name, layer, rows)]

    def add_normed(self, post_name: str, layer: LayerSpec, rows: int | None) -> list[Launch]:
        """Returns a list with the launch for x += scale * norm(delta), which adds the rows that attention or
        feed-forward left in the buffer `delta` to the residual stream x. post_name: prefix of the norm's
        parameter names; rows: rows of x per workgroup; None for prompts. In decoding, the list is empty for a
        layer whose feed-forward runs after its attention, not parallel to it: the next matrix product
        performs the addition, which self.stream.pending records."""
        assert layer.norms.after is not None
        after = self.norm(post_name, layer.norms.after, self.config.hidden_size)
        pending = PendingSum(post_name, after, layer.residual_scale)
        if rows is None:
            return [self._add(pending, "x", "x")]
        if layer.residual == "sequential":
            self.stream.pending = pending
            return []
        return [self._add(pending, self.stream.buffer, self.stream.buffer)]

    def settle(self) -> list[Launch]:
        """Returns the launches that perform a postponed addition, scale * norm(delta), to the residual
        stream, if one is recorded, and that leave the stream in the buffer `x`, with a copy if it is in the
        other buffer; [] if no addition is recorded and the stream is in `x` already. The call itself sets
        `self.stream` to the buffer `x` without a postponed addition."""
        source, pending = self.stream.buffer, self.stream.pending
        self.stream.buffer, self.stream.pending = "x", None
        if pending is not None:
            return [self._add(pending, source, "x")]
        if source == "x":
            return []
        buffers = {"x": source, "y": "x"}
        return [self.launch(norm_rows.copy_rows, (self.config.hidden_size,), {"n": "n"}, buffers)]

    def _add(self, pending: PendingSum, source: str, out: str) -> Launch:
        apart: Buffers = {} if source == out else {"y": out}
        buffers = {"x": source, **apart, "delta": "delta", **self.norm_buffers(pending.name, pending.norm)}
        arguments = (pending.norm, pending.scale, bool(apart))
        return self.launch(norm_rows.add_normed, arguments, {"n": "n"}, buffers)


def bias_of(name: str) -> str:
    """Returns the name of the bias that belongs to the weight `name`, with "bias" in place of "weight" at the
    end.
    """
    return name.removesuffix("weight") + "bias"
