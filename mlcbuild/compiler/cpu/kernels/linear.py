"""Chooses the kernel of each matrix product by its scheme, and emits the calls that a model makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tvm import relax
from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_inplace_op, tensor_ir_op
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels import float_product, int8_product
from mlcbuild.compiler.cpu.kernels.format_kernels import kernel_for
from mlcbuild.compiler.cpu.kernels.prologue import Fusion
from mlcbuild.compiler.cpu.kernels.tiled_matrix import TiledMatrix
from mlcbuild.quant import Storage


@dataclass(frozen=True)
class Linear:
    """The product y = x @ W.T with one stored matrix W [n, k]."""

    isa: ISA
    scheme: Storage
    n: int
    k: int

    @property
    def name(self) -> str:
        """Returns the name of the kernel and the instruction set, for example w4a8.avx512vnni."""
        rows = row_format(self)
        return f"{rows.name if rows else tiles(self).name}.{self.isa.name}"

    @property
    def fallback(self) -> str | None:
        """Returns the reason why a slow kernel is used; None if the kernel is the best one for the target."""
        if self.isa.name == "portable":
            return "no vector instructions known for this target: vectors of 4 without fused or dot products"
        return None

    @property
    def has_prompt_variant(self) -> bool:
        """Returns True if the kernel has a variant for rows of prompts, which rounds differently. An answer
        must not depend on the other rows of a step, so the number of rows cannot decide which variant is
        used.
        """
        return self.isa.amx and row_format(self) is None and self.scheme.definition.blocks is None

    def apply(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Emits the product of x float32 [m, k] with W, and returns float32 [m, n]. weights: W's tensors in
        stored order; m >= 1 may be symbolic. It is one call of a kernel, which all calls with an equal Linear
        share, and never of the variant for prompts.
        """
        out = Tensor.placeholder([x.shape[0], self.n], "float32")
        function = kernel(self, Fusion())
        never = [relax.prim_value(0)] if self.has_prompt_variant else []
        return tensor_ir_op(function, str(function.attrs["global_symbol"]), [x, *weights, *never], out)

    def into(
        self,
        out: Tensor,
        fusion: Fusion,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        prompt: relax.Expr,
    ) -> Tensor:
        """Emits the product into `out`, an existing float32 [m, n], with the prologue and epilogue that are
        fused with it, and returns `out`. inputs: the arguments of the source of x; weights: W's tensors;
        prompt: an int64, not 0 for rows of prompts.
        """
        function = kernel(self, fusion)
        arguments = [*inputs, *weights, *([prompt] if self.has_prompt_variant else []), out]
        shape = Tensor.placeholder(out.shape, "float32")
        return tensor_ir_inplace_op(
            function, str(function.attrs["global_symbol"]), arguments, len(arguments) - 1, shape
        )


def linear(isa: ISA, scheme: Storage, n: int, k: int) -> Linear:
    """Returns the description of the product with a matrix [n, k] that is stored under a quantization scheme
    (that of the parameter, with the recipe's overrides applied).
    """
    return Linear(isa, scheme, n, k)


def row_format(of: Linear) -> float_product.RowFormat | None:
    """Returns the object that reads the stored matrix row by row; None for the x16 layout, which stores tiles
    of 16 rows and no separate rows.
    """
    rows = kernel_for(of.scheme).rows
    return None if rows is None else rows(of.isa, of.n, of.k)


def tiles(of: Linear) -> TiledMatrix:
    """Returns the object that reads the stored matrix in the x16 layout, in tiles of 16 rows and 32 columns.
    Matrices that keep a checkpoint's values never use tile registers, which would round them to bfloat16.
    """
    isa = of.isa if of.scheme.definition.blocks is None else replace(of.isa, amx=False)
    return TiledMatrix(isa, of.scheme, of.n, of.k)


@cache
def kernel(of: Linear, fusion: Fusion) -> PrimFunc:
    """Returns the kernel of a product: (arguments of the source of x, stored tensors, bias if fused, int64
    prompt if there is a prompt variant, out). Equal products share one object."""
    rows = row_format(of)
    if rows:
        return float_product.product(rows, fusion)
    return int8_product.product(tiles(of), fusion)
