"""Emits latent attention (MLA) as calls of CPU kernels. The matrices that expand latents to heads are applied
to queries and to results instead, so that the KV cache holds latents only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op
from tvm.tirx import Expr

from mlcbuild.compiler.cpu.kernels import activation, expert_product, latent_rows
from mlcbuild.compiler.cpu.kernels.expert_product import ExpertMatrices
from mlcbuild.compiler.cpu.kernels.floats import NAME
from mlcbuild.compiler.cpu.kernels.prologue import Fusion, Given, RowSource
from mlcbuild.compiler.cpu.mixture import into
from mlcbuild.compiler.cpu.parts import Parts, dtype_of, float_rows, norm_weights
from mlcbuild.compiler.program.ops import Layer
from mlcbuild.models import LatentAttention, RmsNorm


def latent_columns(spec: LatentAttention) -> dict[str, int]:
    """Returns scratch tensor name -> number of float32 columns that the latent attention of one layer needs
    in it on a CPU; the tensor "qkv" is not included."""
    room = {
        "own": spec.heads * spec.query_dim,
        "token": spec.cached,
        "latents": spec.heads * spec.latent,
        "attended": spec.heads * spec.value_dim,
        "choices": 2 * spec.heads,
    }
    return room | ({"query_latent": spec.query_latent} if spec.query_latent else {})


@dataclass(frozen=True)
class Latents:
    """Emits the latent attention (MLA) of one layer as calls of CPU kernels: from the layer's input rows, one
    for each of n tokens, they compute queries, write the new tokens to the KV cache, and compute attention's
    result before the output matrix, float32 [n, heads * value_dim]."""

    parts: Parts
    layer: Layer
    view: Callable[[str, Expr, int], Tensor]
    """Function of (scratch tensor name, rows, columns) that returns the beginning of this scratch tensor as a
    float32 [rows, columns] tensor.
    """
    product: Callable[[str, Fusion, Sequence[Tensor], Tensor], Tensor]
    """Function of (name of a matrix, fusion, inputs, out) that emits the product of input rows with this
    matrix of the layer into `out`, and returns `out`. fusion: operations that the same kernel computes before
    and after the product; inputs: the tensors from which the input rows are computed.
    """

    @property
    def spec(self) -> LatentAttention:
        spec = self.layer.spec.mixer
        assert isinstance(spec, LatentAttention)
        return spec

    def attend(self, source: RowSource, inputs: Sequence[Tensor]) -> Tensor:
        """Emits latent attention without the output product, as calls of CPU kernels, and returns its result,
        float32 [n, heads * value_dim] for n tokens. The emitted code also writes these tokens to the KV
        cache. source: code that computes the input rows, one for each token, from the tensors `inputs`."""
        spec, n = self.spec, inputs[0].shape[0]
        head_queries = self._own_queries(source, inputs, n)
        tokens = self.product("attn.kv_a", Fusion(source), inputs, self.view("token", n, spec.cached))
        func = latent_rows.every_head(self.parts.isa, spec.heads)
        choices = into(func, [], self.view("choices", n, 2 * spec.heads))
        own_rows, leading = (
            _shaped(head_queries, n * spec.heads, spec.query_dim),
            latent_rows.Leading(spec.query_dim),
        )
        room = self.view("latents", n * spec.heads, spec.latent)
        absorbed = self._per_head("attn.k_b.weight", leading, choices, own_rows, room)
        queries, pages = self._append(head_queries, _shaped(absorbed, n, spec.heads * spec.latent), tokens)
        room = self.view("latents", n, spec.heads * spec.latent)
        mixed = self.parts.paged_attention(spec, queries, pages, self.layer, room)
        mixed = _shaped(mixed, n * spec.heads, spec.latent)
        room = self.view("attended", n * spec.heads, spec.value_dim)
        values = self._per_head("attn.v_b.weight", Given(), choices, mixed, room)
        return _shaped(values, n, spec.heads * spec.value_dim)

    def _own_queries(self, source: RowSource, inputs: Sequence[Tensor], n: Expr) -> Tensor:
        """Emits the products that compute the queries of n tokens, before rotation, and returns them, float32
        [n, heads * query_dim]. source: code that computes the input rows, one for each token, from the
        tensors `inputs`."""
        spec, weights = self.spec, self.layer.weights
        out = self.view("own", n, spec.heads * spec.query_dim)
        if not spec.query_latent:
            return self.product("attn.q", Fusion(source), inputs, out)
        room = self.view("query_latent", n, spec.query_latent)
        first = self.product("attn.q_a", Fusion(source), inputs, room)
        for bias in weights.get("attn.q_a.bias", ()):
            func = activation.biased(self.parts.isa, spec.query_latent, dtype_of(bias))
            first = into(func, [bias], first)
        norm = norm_weights(weights, "attn.q_a_norm")
        normed = self.parts.normed(RmsNorm(spec.eps), spec.query_latent, norm)
        return self.product("attn.q_b", Fusion(normed), [first, *norm], out)

    def _per_head(self, name: str, source: Any, choices: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """Emits the product of each head's vectors with that head's own matrix into `out`, and returns `out`.
        It calls the kernel that multiplies tokens with the matrices of their experts; here heads take the
        place of experts.

        name: the parameter that holds the matrices of all heads; x: float32 [n * heads, columns], the vectors
        of n tokens; source: describes how the kernel reads a row of x; choices: float32 [n, 2 * heads], in
        each row the numbers of all heads, then a weight of 1 for each head."""
        param, weights = self.layer.params[name], self.layer.weights[name]
        assert param.matrix is not None
        heads = self.spec.heads
        stack = ExpertMatrices(self.parts.linear(param.name, param.matrix), heads, heads)
        func = expert_product.kernel(stack, source, scatter=False, pairs=True)
        return into(func, [choices, x, *weights], out)

    def _append(self, head_queries: Tensor, absorbed: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Emits a call of the kernel that prepares n new tokens for latent attention: it rotates queries and
        keys, normalizes latents, and writes each token's latent and shared key to the KV cache. Returns two
        tensors: the queries that attention multiplies with the cached rows, and the changed cache.

        head_queries: float32 [n, heads * query_dim], queries before rotation; absorbed: float32 [n, heads *
        latent], the queries times the key matrices, so that they can be multiplied with cached latents;
        tokens: float32 [n, cached], rows to cache, one for each token, before bias, norm and rotation."""
        spec, layer, parts, batch = self.spec, self.layer, self.parts, self.layer.batch
        bias, weight = layer.weights.get("attn.kv_a.bias", ()), norm_weights(layer.weights, "attn.kv_a_norm")
        norm = parts.norm_of(RmsNorm(spec.eps), spec.latent, weight)
        heads = parts.heads(spec)
        dtype = dtype_of(bias[0]) if bias else None
        func = latent_rows.latent_append(latent_rows.LatentAppend(parts.isa, spec, heads, norm, dtype))
        assert layer.angles is not None
        queries = self.view("qkv", head_queries.shape[0], heads.width)
        arguments = [layer.angles, batch.slots, batch.forks, *bias, *weight, head_queries, absorbed, tokens]
        places = [len(arguments), len(arguments) + 1]
        shapes = [float_rows(*queries.shape), Tensor.placeholder(batch.pages.shape, heads.dtype)]
        inputs = [*arguments, queries, batch.pages, layer.index]
        results = tensor_ir_inplace_op(func, str(func.attrs[NAME]), inputs, places, shapes)
        return results[0], results[1]


def _shaped(x: Tensor, rows: Expr, width: int) -> Tensor:
    """Emits a view of x with the shape [rows, width], in the same memory, and returns it."""
    shaped = relax.op.reshape(x._expr, [rows, width])
    return Tensor(_expr=relax.BlockBuilder.current().emit(shaped))
