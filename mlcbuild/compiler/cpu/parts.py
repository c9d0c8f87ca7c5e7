"""Emits the parts of a transformer layer, such as norms, embeddings and attention, as calls of CPU kernels.

All of them read and write float32 rows. ops.py combines them to the attention and the feed-forward of a
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op
from tvm.tirx import Expr, PrimFunc

from mlcbuild import quant
from mlcbuild.compiler.cpu.isa import ISA, isa_for
from mlcbuild.compiler.cpu.kernels import activation, amx, logit_mask, norm, rope, sampling
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import AttentionKernel
from mlcbuild.compiler.cpu.kernels.embedding import Embedding, embedding
from mlcbuild.compiler.cpu.kernels.floats import NAME
from mlcbuild.compiler.cpu.kernels.kv_cache import Heads
from mlcbuild.compiler.cpu.kernels.linear import Linear, linear
from mlcbuild.compiler.cpu.kernels.prologue import Activated, Gated, Normed
from mlcbuild.compiler.program.ops import Layer, Weights
from mlcbuild.models import (
    Attention,
    Dense,
    Experts,
    LatentAttention,
    LayerNorm,
    LayerSpec,
    Mixer,
    ModelConfig,
    Norm,
    Rope,
)
from mlcbuild.models.alibi import slopes
from mlcbuild.quant import Storage
from mlcbuild.targets.target import Target


def mixture_columns(spec: Experts) -> dict[str, int]:
    """Returns scratch tensor name -> number of float32 columns that a mixture-of-experts layer needs
    in it.
    """
    room = {"pair": 2 * spec.size * spec.chosen, "logits": spec.count, "choices": 2 * spec.chosen}
    if spec.shared_size:
        room["shared"] = 2 * spec.shared_size
    if spec.shared_gate:
        room["shared_logit"] = 1
    return room


def float_rows(count: Expr | int, width: int) -> Tensor:
    return Tensor.placeholder([count, width], "float32")


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)


@dataclass(frozen=True)
class Parts:
    """Emits the parts of transformer layers for one model, quantization scheme and CPU target."""

    config: ModelConfig
    scheme: Storage
    machine: Target
    kv_cache: str = "auto"
    """How the KV cache stores keys and values: "auto" for the floating point type of the quantization scheme,
    "int8" for 8-bit integers with scales. Latents are always stored as with "auto"."""

    @cached_property
    def isa(self) -> ISA:
        return isa_for(self.machine)

    def heads(self, spec: Mixer) -> Heads:
        """Returns a Heads, which holds the numbers and sizes of a layer's heads, by which the attention
        kernel and the KV cache are laid out.
        """
        layers = len(self.config.layers)
        if isinstance(spec, LatentAttention):
            return Heads(layers, spec.heads, 1, spec.cached, self.scheme.dtype, spec.latent)
        dtype = self.scheme.dtype if self.kv_cache == "auto" else self.kv_cache
        return Heads(layers, spec.heads, spec.kv_heads, spec.head_dim, dtype)

    def attending(self, spec: Mixer) -> AttentionKernel:
        """Returns the parameters of a layer's attention kernel as an AttentionKernel: instruction set, heads,
        scale, soft cap, ALiBi and sinks. Prompt rows may be rounded to bfloat16 if the quantization scheme
        already quantizes activations.
        """
        rounded = self.scheme.activation_bits > 0
        if isinstance(spec, LatentAttention):
            return AttentionKernel(self.isa, self.heads(spec), spec.scale, None, rounded)
        sinks = self.scheme.dtype if spec.sinks else None
        heads = self.heads(spec)
        return AttentionKernel(
            self.isa, heads, spec.scale, spec.softcap, rounded, alibi=spec.alibi, sinks=sinks
        )

    def norm_of(self, spec: Norm, size: int, weights: Sequence[Tensor]) -> norm.Norm:
        """Returns a kernels.norm.Norm, which emits a norm over rows of `size` values for the CPU's
        instruction set. weights: the norm's stored tensors, weight then bias, without those that it lacks;
        the weight is missing only if `spec` is a LayerNorm without weight.
        """
        dtypes: list[str | None] = [dtype_of(weight) for weight in weights]
        centered = isinstance(spec, LayerNorm)
        weight = None if isinstance(spec, LayerNorm) and not spec.weight else dtypes.pop(0)
        return norm.Norm(
            self.isa, size, spec.eps, spec.offset, centered, weight, dtypes.pop(0) if dtypes else None
        )

    @cached_property
    def table(self) -> Embedding:
        storage = quant.scheme_for(self.scheme, "embed.weight")
        return embedding(self.isa, storage, self.config.vocab_size, self.config.hidden_size)

    def linear(self, name: str, shape: tuple[int, int]) -> Linear:
        """Returns a Linear, which emits the product of rows with the stored matrix of the parameter `name`.
        shape: (outputs, inputs) of the matrix.
        """
        return linear(self.isa, quant.scheme_for(self.scheme, name), *shape)

    def embed(self, tokens: Tensor, weights: Weights) -> Tensor:
        """Emits the embedding lookup of tokens int32 [n], with the model's scale and norm, and returns
        float32 [n, hidden].
        """
        config = self.config
        rows = self.table.apply(tokens, weights["embed.weight"])
        if config.embedding_scale != 1.0:
            rows = _into(activation.scaled(self.isa, config.embedding_scale, config.hidden_size), [], rows)
        if config.embedding_norm is None:
            return rows
        return self._normed_rows(config.embedding_norm, rows, norm_weights(weights, "embed_norm"))

    def add_positions(self, x: Tensor, positions: Tensor, table: Sequence[Tensor]) -> Tensor:
        """Emits x float32 [n, hidden] plus learned position embeddings, as a new tensor, and returns it: row
        i gets the embedding of positions[i] + the model's offset. positions: int32 [n]; table: the stored
        tensors of the position embeddings.
        """
        config, storage = self.config, quant.scheme_for(self.scheme, "position.weight")
        lookup = embedding(self.isa, storage, config.learned_positions, config.hidden_size)
        if config.position_offset:
            count = Tensor.placeholder(positions.shape, "int32")
            positions = _call(activation.shifted(config.position_offset), [positions], count)
        func = norm.residual(norm.Residual(self.isa, config.hidden_size, None, None))
        return _into(func, [x], lookup.apply(positions, table))

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float, spec: Rope) -> Tensor:
        func = rope.angles(self.isa, spec.dim, factor, spec.query_scale)
        return _call(func, [positions, inv_freq], float_rows(positions.shape[0], spec.columns))

    def copy(self, x: Tensor) -> Tensor:
        return _call(activation.copied(self.isa, self.config.hidden_size), [x], float_rows(*x.shape))

    def gather(self, x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        """Emits a copy of the rows of x with the indices `rows`, int32 [q], into `out`, and returns `out`."""
        return _into(activation.gathered(self.isa, int(x.shape[1])), [x, rows], out)

    def last_norm(self, x: Tensor, weights: Weights) -> Tensor:
        return self._normed_rows(self.config.norm, x, norm_weights(weights, "norm"))

    def _normed_rows(self, spec: Norm, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        func = norm.all_rows(self.norm_of(spec, x.shape[1], weights))
        return _call(func, [x, *weights], float_rows(*x.shape))

    def select_rows(self, x: Tensor, rows: Tensor, weights: Weights) -> Tensor:
        """Emits the model's last norm for the rows of x with the indices `rows`, int32 [q], and returns
        float32 [q, hidden].
        """
        weights_of_norm = norm_weights(weights, "norm")
        func = norm.gather_norm(self.norm_of(self.config.norm, x.shape[1], weights_of_norm))
        return _call(func, [x, rows, *weights_of_norm], float_rows(rows.shape[0], x.shape[1]))

    def rope_append(self, spec: Attention, qkv: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Emits the kernel between the qkv product and attention. As far as the layer has these parts, it
        adds biases to queries, keys and values, clips them (queries and keys after their norms, if these
        precede the rotation), normalizes and rotates queries and keys, and scales queries by position.
        Queries are changed in place in qkv; keys and values are written to the KV cache, and their columns of
        qkv are undefined afterwards. Then it copies the pages of the cache that `batch.forks` lists, for
        branches of a tree of draft tokens. Returns (qkv, cache), both changed in place.
        """
        heads, batch, extras = self.heads(spec), layer.batch, layer.weights
        bias = extras.get("attn.qkv.bias", ())
        head_norms = [norm_weights(extras, f"attn.{kind}_norm") for kind in "qk"]
        turns = None if spec.rope is None else self.config.ropes[spec.rope]
        func = rope.rope_append(
            rope.Append(
                self.isa,
                heads,
                0 if turns is None else turns.dim,
                _dtype(bias),
                self._head_norms(spec, head_norms),
                spec.qk_norm_span == "own_head",
                spec.qk_norm_last,
                spec.clip,
                turns is not None and turns.query_scale is not None,
            )
        )
        angles = [] if layer.angles is None else [layer.angles]
        arguments = [*angles, batch.slots, batch.forks, *bias, *head_norms[0], *head_norms[1]]
        where = [len(arguments), len(arguments) + 1]
        out = [float_rows(*qkv.shape), Tensor.placeholder(batch.pages.shape, heads.dtype)]
        inputs = [*arguments, qkv, batch.pages, layer.index]
        results = tensor_ir_inplace_op(func, func_name(func), inputs, where, out)
        return results[0], results[1]

    def _head_norms(
        self, spec: Attention, weights: Sequence[Sequence[Tensor]]
    ) -> tuple[norm.Norm, norm.Norm] | None:
        """Returns (norm of queries, norm of keys) of a layer; None if the layer has no such norms. A layer
        has both or neither.
        """
        if spec.qk_norm is None:
            return None
        counts = (spec.heads, spec.kv_heads) if spec.qk_norm_span == "heads" else (1, 1)
        query, key = (
            self.norm_of(spec.qk_norm, count * spec.head_dim, norm_tensors)
            for count, norm_tensors in zip(counts, weights, strict=True)
        )
        return query, key

    def paged_attention(self, spec: Mixer, qkv: Tensor, pages: Tensor, layer: Layer, out: Tensor) -> Tensor:
        """Emits the attention kernel, which writes its result to `out`, and returns `out`. If `out` has more
        columns than the result needs, prompt rows are stored at its start as tiles for AMX; the caller makes
        it wider only if attention can do this.
        """
        batch, kernel = layer.batch, self.attending(spec)
        tensors = [qkv, pages, batch.q_indptr, batch.page_indptr, batch.page_table, batch.kv_lengths]
        numbers = [layer.index, layer.window, *([layer.prompt] if kernel.has_prompt_variant else [])]
        if isinstance(spec, LatentAttention):
            return _into(attention(kernel), [*tensors, batch.positions, *numbers], out)
        if spec.alibi is not None:
            numbers.append(Tensor(_expr=relax.const(np.array(slopes(spec.heads, spec.alibi), np.float32))))
        if spec.sinks:
            (sinks,) = layer.weights["attn.sinks"]
            kernel, numbers = replace(kernel, sinks=dtype_of(sinks)), [*numbers, sinks]
        columns = int(out.shape[1])
        if columns > spec.heads * spec.head_dim:
            kernel = replace(kernel, columns=columns)
        return _into(attention(kernel), [*tensors, batch.positions, *numbers], out)

    def amx_tile_columns(self, spec: LayerSpec, output: Linear) -> int:
        """Returns the number of columns with which the scratch tensor "pair" is viewed if attention can store
        its output for prompts in this tensor, as tiles for AMX; 0 if it cannot. Later in the layer the tensor
        holds the feed-forward's gate and up values. output: the matrix product that reads the tiles,
        attention's output projection."""
        columns = self.pair_columns(spec.feed_forward)
        able = (
            self.attending(spec.mixer).uses_tiles and output.has_prompt_variant and amx.Packed.fits(output.k)
        )
        return columns if able and columns >= 2 * output.k else 0

    def feed_forward_columns(self, spec: Dense | Experts) -> dict[str, int]:
        """Returns scratch tensor name -> number of float32 columns that a layer's feed-forward needs in
        it."""
        return mixture_columns(spec) if isinstance(spec, Experts) else {"pair": self.pair_columns(spec)}

    def pair_columns(self, spec: Dense | Experts) -> int:
        """Returns the number of columns of the result of a feed-forward's first product: the values of gate
        and up, or of up only; of one expert in a mixture of experts.
        """
        return spec.size if isinstance(spec, Dense) and not spec.gated else 2 * spec.size

    def add(
        self, spec: LayerSpec, x: Tensor, delta: Tensor, bias: Sequence[Tensor], post: Sequence[Tensor]
    ) -> Tensor:
        """Emits x += scale * norm(delta + bias), in place, and returns x; scale, norm and bias are left out
        where the layer has none. bias, post: the stored tensors of bias and norm, empty if there are none.
        """
        width = int(x.shape[1])
        after = None if spec.norms.after is None else self.norm_of(spec.norms.after, width, post)
        func = norm.residual(norm.Residual(self.isa, width, _dtype(bias), after, spec.residual_scale))
        return _into(func, [delta, *bias, *post], x)

    def normed(self, spec: Norm, width: int, weights: Sequence[Tensor]) -> Normed:
        """Returns an object with which the kernel of a matrix product computes the rows that it multiplies:
        the norm of rows of `width` float32 values. spec: description of the norm; weights: its stored
        tensors."""
        return Normed(self.norm_of(spec, width, weights))

    def gate(self, spec: Dense) -> activation.Gate:
        """Returns the Gate, by which CPU kernels emit the gated activation of a feed-forward, act(gate) * up,
        where gate and up are the two halves of a row.
        """
        return activation.Gate(self.isa, spec.activation, spec.size)

    def gated(self, spec: Dense, bias: Sequence[Tensor], packed: bool) -> Gated:
        """Returns an object with which the kernel of a matrix product computes the rows that it multiplies:
        act(gate) * up, from rows that hold the values of gate, then those of up. bias: stored tensors of the
        bias of gate and up, empty if there is none; packed: True if the input for prompts already holds
        act(gate) * up, packed in the tiles of AMX."""
        return Gated(self.gate(spec), _dtype(bias), packed)

    def activated(self, spec: Dense, bias: Sequence[Tensor], scalars: Sequence[Tensor]) -> Activated:
        """Returns an object with which the kernel of a matrix product computes the rows that it multiplies:
        act(up), in a feed-forward without gate. bias: stored tensors of the bias of up, empty if there is
        none; scalars: a list of the one stored tensor of the activation's parameters, empty if it has none.
        """
        return Activated(self.isa, spec.activation, spec.size, _dtype(bias), _dtype(scalars))

    def packs(self, first: Linear, second: Linear, bias: Sequence[Tensor]) -> bool:
        """Returns True if the first product of a gated feed-forward writes act(gate) * up of prompt rows
        packed for AMX, as the second product reads them. bias: the tensors of the gates' bias, if any.
        """
        return (
            first.has_prompt_variant and second.has_prompt_variant and not bias and amx.Packed.fits(second.k)
        )

    def gated_fallback(self, first: Linear, second: Linear, bias: bool) -> str | None:
        """Returns the reason why a feed-forward's values act(gate) * up of prompt rows are stored as float32,
        not packed in the tiles of AMX, although both of its matrix products use AMX. Returns None if they are
        packed, or if a product does not use AMX. first, second: the two products; bias: True if the gates
        have a bias."""
        if not (first.has_prompt_variant and second.has_prompt_variant) or (
            not bias and amx.Packed.fits(second.k)
        ):
            return None
        why = "gates have a bias" if bias else f"rows of {second.k} values are no whole tiles, or too short"
        return f"{why}: rows of prompts go through float32 before this product"

    def logits(self, x: Tensor, weights: Weights) -> Tensor:
        """Emits the logits of normalized rows x float32 [q, hidden], with the model's bias, scale and soft
        cap, in this order, and returns float32 [q, vocab].
        """
        config = self.config
        name = "embed.weight" if config.tie_embeddings else "lm_head.weight"
        logits = self.linear(name, (config.vocab_size, config.hidden_size)).apply(x, weights[name])
        if config.head_bias:
            (bias,) = weights["lm_head.bias"]
            func = activation.biased(self.isa, config.vocab_size, dtype_of(bias))
            logits = _into(func, [bias], logits)
        if config.logit_scale != 1.0:
            logits = _into(activation.scaled(self.isa, config.logit_scale, config.vocab_size), [], logits)
        if config.logit_softcap is None:
            return logits
        return _into(activation.capped(self.isa, config.logit_softcap, config.vocab_size), [], logits)

    def mask(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Emits the kernel that sets the logits of excluded tokens to minus infinity, in place, and returns
        the logits [q, vocab]. masks: int32 [m, 1 + w], each row the index of a row of logits, then w words
        with one bit per token, lowest token in the lowest bit, 0 if excluded.
        """
        return _into(logit_mask.masked(self.isa), [masks], logits)

    def sample(self, logits: Tensor, params: Tensor, out: Tensor) -> Tensor:
        """Emits the kernel that samples a token from each of q rows of logits, float32 [1, q, vocab], into
        `out`, int32 [q]: -2 if the row's 1 / temperature is negative or NaN, -1 if a logit is NaN or the
        largest one is infinite. This function returns the logits, which stay unchanged. params: float64 [q,
        5], for each row 1 / temperature, logit_drop (min_p as the smallest allowed difference, at most 0,
        from the largest logit), top_p, top_k and a random number.
        """
        func = sampling.sample(self.isa)
        shapes = [Tensor.placeholder(logits.shape, "float32"), Tensor.placeholder(out.shape, "int32")]
        inputs = [logits, params, out]
        unchanged: Tensor = tensor_ir_inplace_op(func, func_name(func), inputs, [0, 2], shapes)[0]
        return unchanged


def norm_weights(weights: Weights, name: str) -> list[Tensor]:
    """Returns the stored tensors of the norm `name`: weight, then bias, without those that the norm lacks; []
    if there is no such norm.
    """
    return [tensor for kind in ("weight", "bias") for tensor in weights.get(f"{name}.{kind}", ())]


def func_name(func: PrimFunc) -> str:
    return str(func.attrs[NAME])


def _call(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    return tensor_ir_op(func, func_name(func), arguments, out)


def _into(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    """Emits a call of the kernel `func` with `arguments` and a last argument `out`, which the kernel writes
    or changes in place, and returns `out`.
    """
    shape = float_rows(*out.shape)
    return tensor_ir_inplace_op(func, func_name(func), [*arguments, out], len(arguments), shape)


def _dtype(optional: Sequence[Tensor]) -> str | None:
    return dtype_of(optional[0]) if optional else None
