"""The parts of a program as calls of a CPU's kernels: each emits one or two steps of the library's program.

All take float32 rows and give float32 rows. ops.py makes halves of layers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op
from tvm.tirx import Expr, PrimFunc, Var

from mlcbuild import quant
from mlcbuild.compiler.cpu.isa import ISA, isa_for
from mlcbuild.compiler.cpu.kernels import activation, amx, logit_mask, norm, rope, sampling
from mlcbuild.compiler.cpu.kernels.attention import attention
from mlcbuild.compiler.cpu.kernels.attention_plan import Attention
from mlcbuild.compiler.cpu.kernels.cache import Heads
from mlcbuild.compiler.cpu.kernels.embedding import Embedding, embedding
from mlcbuild.compiler.cpu.kernels.floats import NAME
from mlcbuild.compiler.cpu.kernels.linear import Linear, linear
from mlcbuild.compiler.cpu.kernels.prologue import Gated, Normed
from mlcbuild.compiler.program.ops import Batch, Weights
from mlcbuild.models import ModelConfig
from mlcbuild.quant import Storage
from mlcbuild.targets.target import Target


def float_rows(count: Expr | int, width: int) -> Tensor:
    return Tensor.placeholder([count, width], "float32")


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)


@dataclass(frozen=True)
class Parts:
    config: ModelConfig
    scheme: Storage
    machine: Target

    @cached_property
    def isa(self) -> ISA:
        return isa_for(self.machine)

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
        return _call(func, [positions, inv_freq], float_rows(positions.shape[0], dim))

    def copy(self, x: Tensor) -> Tensor:
        return _call(activation.copied(self.isa, self.config.hidden_size), [x], float_rows(*x.shape))

    def gather(self, x: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """The rows `chosen` int32 [q] of x, into `out`."""
        return _into(activation.gathered(self.isa, int(x.shape[1])), [x, chosen], out)

    def last_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _call(
            norm.rms_norm(self.norm(x.shape[1]), dtype_of(weight)), [x, weight], float_rows(*x.shape)
        )

    def select_rows(self, x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """The last norm of the rows int32 [q] of x."""
        func = norm.gather_norm(self.norm(x.shape[1]), dtype_of(weight))
        return _call(func, [x, rows, weight], float_rows(rows.shape[0], x.shape[1]))

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
        out = [float_rows(*qkv.shape), Tensor.placeholder(batch.pages.shape, heads.dtype)]
        found = tensor_ir_inplace_op(func, func_name(func), [*arguments, qkv, batch.pages, layer], where, out)
        return found[0], found[1]

    def paged_attention(
        self, qkv: Tensor, pages: Tensor, batch: Batch, place: tuple[Var, Var, Var], out: Tensor
    ) -> Tensor:
        """place = (layer, window, prompt). Rows of prompts may be packed where `out` has more columns than it
        needs; see writes_amx_tiles."""
        tensors = [qkv, pages, batch.q_indptr, batch.page_indptr, batch.page_table, batch.kv_lengths]
        numbers = place if self.attending.has_prompt_variant else place[:2]
        columns = int(out.shape[1])
        wide = columns > self.heads.query * self.heads.dim
        spec = replace(self.attending, columns=columns) if wide else self.attending
        return _into(attention(spec), [*tensors, batch.positions, *numbers], out)

    def writes_amx_tiles(self, product: Linear) -> int:
        """Returns the columns of the tensor for gates and ups if attention can write rows of prompts to it as
        AMX tiles for the product that follows; otherwise 0."""
        columns = 2 * self.config.intermediate_size
        able = self.attending.has_prompt_variant and product.has_prompt_variant and amx.Packed.fits(product.k)
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
        return (
            first.has_prompt_variant and second.has_prompt_variant and not bias and amx.Packed.fits(second.k)
        )

    def gated_fallback(self, first: Linear, second: Linear, bias: bool) -> str | None:
        """Why gated rows of prompts are not handed on packed, though tile registers multiply them."""
        if not (first.has_prompt_variant and second.has_prompt_variant) or (
            not bias and amx.Packed.fits(second.k)
        ):
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

    def mask(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Logits [q, vocab] without those of tokens that must not be chosen, in place."""
        return _into(logit_mask.masked(self.isa), [masks], logits)

    def sample(self, logits: Tensor, params: Tensor, out: Tensor) -> Tensor:
        """Logits [1, q, vocab] as they are, after one token for each row, in place in `out`."""
        func = sampling.sample(self.isa)
        shapes = [Tensor.placeholder(logits.shape, "float32"), Tensor.placeholder(out.shape, "int32")]
        found: Tensor = tensor_ir_inplace_op(func, func_name(func), [logits, params, out], [0, 2], shapes)[0]
        return found


def func_name(func: PrimFunc) -> str:
    return str(func.attrs[NAME])


def _call(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    return tensor_ir_op(func, func_name(func), arguments, out)


def _into(func: PrimFunc, arguments: list[Tensor | Expr], out: Tensor) -> Tensor:
    """Call a kernel whose last argument is what it writes, or changes."""
    shape = float_rows(*out.shape)
    return tensor_ir_inplace_op(func, func_name(func), [*arguments, out], len(arguments), shape)


def _dtype(optional: Sequence[Tensor]) -> str | None:
    return dtype_of(optional[0]) if optional else None
