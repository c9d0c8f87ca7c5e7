"""Chooses the CPU kernel of each matrix product by its quantization scheme, and emits calls of it."""

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
    """The matrix product y = x @ W.T with one stored matrix W [n, k], for one instruction set and scheme."""

    isa: ISA
    scheme: Storage
    n: int
    k: int

    @property
    def name(self) -> str:
        """Returns the name of the product's kernel and instruction set, for example w4a8.avx512vnni."""
        rows = row_format(self)
        return f"{rows.name if rows else tiles(self).name}.{self.isa.name}"

    @property
    def fallback(self) -> str | None:
        """Returns the reason why the product's kernel is slow for the target; None if it is the best one."""
        if self.isa.name == "portable":
            return "no vector instructions known for this target: vectors of 4 without fused or dot products"
        return None

    @property
    def has_prompt_variant(self) -> bool:
        """Returns True if the product's kernel has a variant for prompt rows, which rounds differently. The
        caller chooses the variant: if the number of rows did, a result would depend on other rows in the
        batch.
        """
        return self.isa.amx and row_format(self) is None and self.scheme.definition.blocks is None

    def apply(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Emits the product of x float32 [m, k] with W, and returns float32 [m, n]. It never uses the
        kernel's variant for prompts, which rounds to bfloat16. weights: W's tensors in stored order; m >= 1
        may be symbolic.
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
        """Emits the product into `out`, an existing float32 [m, n], with the prologue and epilogue of
        `fusion`, and returns `out`. inputs: the tensors that the prologue reads; weights: W's tensors;
        prompt: an int64, not 0 for prompt rows.
        """
        function = kernel(self, fusion)
        arguments = [*inputs, *weights, *([prompt] if self.has_prompt_variant else []), out]
        shape = Tensor.placeholder(out.shape, "float32")
        return tensor_ir_inplace_op(
            function, str(function.attrs["global_symbol"]), arguments, len(arguments) - 1, shape
        )


def linear(isa: ISA, scheme: Storage, n: int, k: int) -> Linear:
    """Returns the description of the product with a stored matrix [n, k]. scheme: the scheme of this
    parameter, with the recipe's overrides applied.
    """
    return Linear(isa, scheme, n, k)


def row_format(of: Linear) -> float_product.RowFormat | None:
    """Returns the RowFormat that reads the product's matrix row by row; None for the x16 layout, which stores
    tiles of 16 rows.
    """
    rows = kernel_for(of.scheme).rows
    return None if rows is None else rows(of.isa, of.n, of.k)


def tiles(of: Linear) -> TiledMatrix:
    """Returns the description of the product's matrix in the x16 layout, tiles of 16 rows and 32 columns. AMX
    is used only for formats with a single scale per group of 32 weights and no minima, since it would round
    other weights to bfloat16.
    """
    isa = of.isa if of.scheme.definition.blocks is None else replace(of.isa, amx=False)
    return TiledMatrix(isa, of.scheme, of.n, of.k)


@cache
def kernel(of: Linear, fusion: Fusion) -> PrimFunc:
    """Returns the kernel of a product with the arguments (tensors of the prologue, stored tensors, bias if
    fused, int64 prompt if there is a variant for prompts, out). Equal products share one object.
    """
    rows = row_format(of)
    if rows:
        return float_product.product(rows, fusion)
    return int8_product.product(tiles(of), fusion)
