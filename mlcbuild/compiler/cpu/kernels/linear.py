"""The matrix product of every scheme: which kernel computes it, and the call that a model makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import float_product, int8_product
from mlcbuild.compiler.cpu.kernels.dense import DenseRows
from mlcbuild.compiler.cpu.kernels.format_kernels import kernel_for
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.compiler.cpu.kernels.row_group import GroupRows
from mlcbuild.quant import Storage


@dataclass(frozen=True)
class Linear:
    """y = x @ W.T for one stored matrix W [n, k]."""

    isa: ISA
    scheme: Storage
    n: int
    k: int

    @property
    def name(self) -> str:
        """Kernel and instruction set, for example w4a8.avx512vnni."""
        rows = row_format(self)
        return f"{rows.name if rows else f'w{self.scheme.bits}a8'}.{self.isa.name}"

    @property
    def fallback(self) -> str | None:
        """Why a slow path is taken; None where the kernel is the right one for the target."""
        if self.isa.name == "portable":
            return "no vector instructions known for this target: vectors of 4 without fused or dot products"
        return None

    @property
    def has_prompt_variant(self) -> bool:
        """The kernel has a variant for rows of prompts, which rounds differently. An answer must not depend
        on what shares a step, so the number of rows cannot decide which variant is used."""
        return self.isa.amx and row_format(self) is None

    def apply(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """x float32 [m, k] (m >= 1, may be symbolic), W's tensors in stored order -> float32 [m, n]. Emits
        one call of a kernel, which all calls with an equal Linear share. Never the variant for prompts."""
        out = Tensor.placeholder([x.shape[0], self.n], "float32")
        made = kernel(self, Fusion())
        never = [relax.prim_value(0)] if self.has_prompt_variant else []
        return tensor_ir_op(made, str(made.attrs["global_symbol"]), [x, *weights, *never], out)

    def into(
        self,
        out: Tensor,
        fusion: Fusion,
        given: Sequence[Tensor],
        weights: Sequence[Tensor],
        prompt: relax.Expr,
    ) -> Tensor:
        """The same into `out` float32 [m, n], which is there, with what is fused around the product. `given`
        is what the source of x takes; `prompt` is an int64, not 0 for rows of prompts."""
        made = kernel(self, fusion)
        arguments = [*given, *weights, *([prompt] if self.has_prompt_variant else []), out]
        shape = Tensor.placeholder(out.shape, "float32")
        return tensor_ir_inplace_op(
            made, str(made.attrs["global_symbol"]), arguments, len(arguments) - 1, shape
        )


def linear(isa: ISA, scheme: Storage, n: int, k: int) -> Linear:
    """The product with a matrix [n, k] stored under a scheme (that of the parameter: overrides resolved)."""
    return Linear(isa, scheme, n, k)


def row_format(of: Linear) -> float_product.RowFormat | None:
    """How the rows of the matrix are read; None for the x16 layout, which has no rows."""
    scheme, kind = of.scheme, kernel_for(of.scheme)
    if kind == "dense":
        return DenseRows(of.isa, of.n, of.k, scheme.dtype)
    if kind == "rows":
        return GroupRows(of.isa, of.n, of.k, scheme.bits, scheme.dtype)
    return None


@cache
def kernel(of: Linear, fusion: Fusion) -> PrimFunc:
    """The function (source of x, stored tensors, bias if asked for, int64 prompt if the Linear asks, out)
    behind a product; one object for equals."""
    rows = row_format(of)
    if rows:
        return float_product.product(rows, fusion)
    return int8_product.product(of.isa, of.scheme.bits, (of.n, of.k), fusion)
