"""The parts of a decoder as calls of kernels: what each emits is one or two steps of the library's program.

A Parts value is fixed for one library. Its methods are called while a Relax function is being built and
return handles of tensors; all of them take float32 rows and give float32 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op
from tvm.tirx import Expr, PrimFunc, Var

from mlcbuild import quant
from mlcbuild.compiler.kernels import activation, amx, masks, norm, rope, sampling
from mlcbuild.compiler.kernels.attention import attention
from mlcbuild.compiler.kernels.attention_plan import Attention
from mlcbuild.compiler.kernels.cache import Heads
from mlcbuild.compiler.kernels.embedding import Embedding, embedding
from mlcbuild.compiler.kernels.floats import NAME
from mlcbuild.compiler.kernels.fusion import Gated, Normed
from mlcbuild.compiler.kernels.isa import ISA
from mlcbuild.compiler.kernels.linear import Linear, linear
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Scheme

Weights = Mapping[str, Sequence[Tensor]]
"""The stored tensors of each parameter, in stored order."""


@dataclass(frozen=True)
class Batch:
    """The tensors that say which rows belong to which sequence, and where their keys and values are."""

    pages: Tensor  # the cache
    positions: Tensor  # int32 [n]
    slots: Tensor  # int32 [n]
    q_indptr: Tensor  # int32 [b+1]
    page_indptr: Tensor  # int32 [b+1]
    page_table: Tensor  # int32 [p]
    kv_lengths: Tensor  # int32 [b]
    forks: Tensor  # int32 [f, 3]: (from page, to page, tokens)


def rows(count: Expr | int, width: int) -> Tensor:
    return Tensor.placeholder([count, width], "float32")


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)


@dataclass(frozen=True)
class Parts:
    config: ModelConfig
    scheme: Scheme
    isa: ISA

    @cached_property
    def heads(self) -> Heads:
        config = self.config
        kv = config.num_kv_heads
        return Heads(config.num_layers, config.num_heads, kv, config.head_dim, self.scheme.dtype)

    @cached_property
    def attending(self) -> Attention:
        """Prompts may be rounded where the scheme rounds activations anyway."""
        config, rounded = self.config, self.scheme.activation_bits > 0
        return Attention(self.isa, self.heads, config.attention_scale, config.attention_softcap, rounded)

    def norm(self, size: int) -> norm.Norm:
        return norm.Norm(self.isa, size, self.config.norm_eps, self.config.norm_offset)

    @cached_property
    def table(self) -> Embedding:
        own = quant.scheme_for(self.scheme, "embed.weight")
        return embedding(self.isa, own, self.config.vocab_size, self.config.hidden_size)

    def linear(self, name: str, shape: tuple[int, int]) -> Linear:
        """The product with the parameter `name` of this [out, in] shape."""
        return linear(self.isa, quant.scheme_for(self.scheme, name), *shape)

    def embed(self, tokens: Tensor, weights: Weights) -> Tensor:
        """tokens int32 [n] -> [n, hidden], scaled as the family does."""
        config = self.config
        found = self.table.apply(tokens, weights["embed.weight"])
        if config.embedding_scale == 1.0:
            return found
        return _into(activation.scaled(self.isa, config.embedding_scale, config.hidden_size), [], found)

    def angles(self, positions: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
        dim = self.config.rope.dim
        func = rope.angles(self.isa, dim, factor)
        return _call(func, [positions, inv_freq], rows(positions.shape[0], dim))

    def copy(self, x: Tensor) -> Tensor:
        return _call(activation.copied(self.isa, self.config.hidden_size), [x], rows(*x.shape))

    def gather(self, x: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """The rows `chosen` int32 [q] of x, into `out`."""
        return _into(activation.gathered(self.isa, int(x.shape[1])), [x, chosen], out)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _call(norm.rms_norm(self.norm(x.shape[1]), dtype_of(weight)), [x, weight], rows(*x.shape))

    def chosen_norm(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """The norm of the rows `chosen` int32 [q] of x."""
        func = norm.gather_norm(self.norm(x.shape[1]), dtype_of(weight))
        return _call(func, [x, chosen, weight], rows(chosen.shape[0], x.shape[1]))

    def rope_append(
        self, qkv: Tensor, turns: Tensor, batch: Batch, layer: Var, extras: Weights
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries (in place in qkv) and the cache with the new keys and values."""
        heads, config = self.heads, self.config
        bias = extras.get("attn.qkv.bias", ())
        norms = [*extras.get("attn.q_norm.weight", ()), *extras.get("attn.k_norm.weight", ())]
        dtypes = (dtype_of(norms[0]), dtype_of(norms[1])) if norms else ("float32", "float32")
        func = rope.rope_append(
            rope.Append(
                self.isa,
                heads,
                config.rope.dim,
                dtype_of(bias[0]) if bias else None,
                self.norm(heads.dim) if norms else None,
                dtypes,
            )
        )
        arguments = [turns, batch.slots, batch.forks, *bias, *norms]
        where = [len(arguments), len(arguments) + 1]
        out = [rows(*qkv.shape), Tensor.placeholder(batch.pages.shape, heads.dtype)]
        found = tensor_ir_inplace_op(func, func_name(func), [*arguments, qkv, batch.pages, layer], where, out)
        return found[0], found[1]

    def attention(
        self, qkv: Tensor, pages: Tensor, batch: Batch, place: tuple[Var, Var, Var], out: Tensor
    ) -> Tensor:
        """place = (layer, window, prompt). Rows of prompts may be packed where `out` has more columns than it
        needs; see hands_on."""
        tensors = [qkv, pages, batch.q_indptr, batch.page_indptr, batch.page_table, batch.kv_lengths]
        numbers = place if self.attending.asks else place[:2]
        columns = int(out.shape[1])
        wide = columns > self.heads.query * self.heads.dim
        spec = replace(self.attending, columns=columns) if wide else self.attending
        return _into(attention(spec), [*tensors, batch.positions, *numbers], out)

    def hands_on(self, product: Linear) -> int:
        """Columns of the tensor for gates and ups, if attention can hand prompts' rows to the product after
        it in there, packed; otherwise 0."""
        columns = 2 * self.config.intermediate_size
        able = self.attending.asks and product.asks and amx.Packed.fits(product.k)
        return columns if able and columns >= 2 * product.k else 0

    def add(self, x: Tensor, delta: Tensor, bias: Sequence[Tensor], post: Sequence[Tensor]) -> Tensor:
        """x += [post norm of] (delta + bias), in place."""
        func = norm.residual(norm.Residual(self.norm(x.shape[1]), _dtype(bias), _dtype(post)))
        return _into(func, [delta, *bias, *post], x)

    def normed(self, weight: Tensor) -> Normed:
        """The source of a product: the norm of rows as wide as `weight`."""
        return Normed(self.norm(int(weight.shape[0])), dtype_of(weight))

    @property
    def gate(self) -> activation.Gate:
        return activation.Gate(self.isa, self.config.activation, self.config.intermediate_size)

    def gated(self, bias: Sequence[Tensor], packed: bool) -> Gated:
        """The source of a product: act(gate) * up."""
        return Gated(self.gate, _dtype(bias), packed)

    def packs(self, first: Linear, second: Linear, bias: Sequence[Tensor]) -> bool:
        """Of two products, the first hands gated rows of prompts to the second packed."""
        return first.asks and second.asks and not bias and amx.Packed.fits(second.k)

    def gated_fallback(self, first: Linear, second: Linear, bias: bool) -> str | None:
        """Why gated rows of prompts are not handed on packed, though tile registers multiply them."""
        if not (first.asks and second.asks) or (not bias and amx.Packed.fits(second.k)):
            return None
        why = "gates have a bias" if bias else f"rows of {second.k} values are no whole tiles, or too short"
        return f"{why}: rows of prompts go through float32 before this product"

    def logits(self, x: Tensor, weights: Weights) -> Tensor:
        """x [q, hidden], normed -> [q, vocab]."""
        config = self.config
        name = "embed.weight" if config.tie_embeddings else "lm_head.weight"
        found = self.linear(name, (config.vocab_size, config.hidden_size)).apply(x, weights[name])
        if config.logit_softcap is None:
            return found
        return _into(activation.capped(self.isa, config.logit_softcap, config.vocab_size), [], found)

    def masked(self, logits: Tensor, given: Tensor) -> Tensor:
        """Logits [q, vocab] without those of tokens that must not be chosen, in place."""
        return _into(masks.masked(self.isa), [given], logits)

    def chosen(self, logits: Tensor, ways: Tensor, tokens: Tensor) -> Tensor:
        """Logits [1, q, vocab] as they are, after one token for each row, in place in `tokens`."""
        func = sampling.sample(self.isa)
        out = [Tensor.placeholder(logits.shape, "float32"), Tensor.placeholder(tokens.shape, "int32")]
        found: Tensor = tensor_ir_inplace_op(func, func_name(func), [logits, ways, tokens], [0, 2], out)[0]
        return found


def func_name(func: PrimFunc) -> str:
    return str(func.attrs[NAME])


def _call(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    return tensor_ir_op(func, func_name(func), arguments, out)


def _into(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    """Call a kernel whose last argument is what it writes, or changes."""
    shape = rows(*out.shape)
    return tensor_ir_inplace_op(func, func_name(func), [*arguments, out], len(arguments), shape)


def _dtype(optional: Sequence[Tensor]) -> str | None:
    return dtype_of(optional[0]) if optional else None
