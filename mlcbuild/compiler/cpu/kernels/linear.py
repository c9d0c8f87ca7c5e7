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
    """Emits calls of the CPU kernel that computes y = x @ W.T with one stored matrix W [n, k], for one
    instruction set and quantization scheme, and returns the kernel's name and properties."""

    isa: ISA
    scheme: Storage
    n: int
    k: int

    @property
    def name(self) -> str:
        """Returns a name such as w4a8.avx512vnni: the name of the kernel that computes this matrix product, a
        dot, and the name of its instruction set. Raises CompileError if there is no kernel for W's format.
        """
        rows = row_format(self)
        return f"{rows.name if rows else tiles(self).name}.{self.isa.name}"

    @property
    def fallback(self) -> str | None:
        """Returns the reason why the kernel of this matrix product is slow on the target: no vector
        instructions are known for it. None for all other targets.
        """
        if self.isa.name == "portable":
            return "no vector instructions known for this target: vectors of 4 without fused or dot products"
        return None

    @property
    def has_prompt_variant(self) -> bool:
        """Returns True if the kernel of this matrix product has a variant for prompt rows, which rounds
        differently. The caller chooses the variant: if the number of rows did, a result would depend on other
        rows in the batch. Raises CompileError if the target has AMX and there is no kernel for W's format.
        """
        return self.isa.amx and row_format(self) is None and self.scheme.definition.blocks is None

    def apply(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Emits the product of x float32 [m, k] with the transposed matrix W [n, k], and returns float32 [m,
        n]. It never uses the kernel's variant for prompts, which rounds to bfloat16. weights: W's tensors in
        stored order; m >= 1 may be symbolic. Raises CompileError if there is no kernel for W's format."""
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
        """Emits the matrix product x @ W.T into `out`, an existing float32 [m, n], and returns `out`. fusion:
        what the same kernel computes before the product (rows of x) and after it (bias, addition to `out`,
        gate); inputs: the tensors from which rows of x are computed; weights: W's tensors in stored order;
        prompt: an int64, not 0 for prompt rows, ignored if the kernel has no variant for prompts. Raises
        CompileError if there is no kernel for W's format."""
        function = kernel(self, fusion)
        arguments = [*inputs, *weights, *([prompt] if self.has_prompt_variant else []), out]
        shape = Tensor.placeholder(out.shape, "float32")
        return tensor_ir_inplace_op(
            function, str(function.attrs["global_symbol"]), arguments, len(arguments) - 1, shape
        )


def linear(isa: ISA, scheme: Storage, n: int, k: int) -> Linear:
    """Returns a Linear, which emits the product x @ W.T with a stored matrix W [n, k]. isa: instruction set
    of the kernel; scheme: the quantization scheme of W, with the recipe's overrides applied. Whether there is
    a kernel for W's format is not checked until the product is emitted or named.
    """
    return Linear(isa, scheme, n, k)


def row_format(of: Linear) -> float_product.RowFormat | None:
    """Returns a RowFormat, which emits reads of the stored weight matrix of a product row by row; None for a
    matrix in the x16 layout, which stores tiles of 16 rows. of: the product. Raises CompileError if there is
    no kernel for the matrix's format.
    """
    rows = kernel_for(of.scheme).rows
    return None if rows is None else rows(of.isa, of.n, of.k)


def tiles(of: Linear) -> TiledMatrix:
    """Returns a TiledMatrix, which emits reads of the weight matrix of a product in tiles of 16 rows and 32
    columns. of: the product, whose matrix must have the x16 layout, which is not checked. Its instruction set
    keeps AMX only for formats with a single scale per group of 32 weights and no minima, since AMX would
    round other weights to bfloat16."""
    isa = of.isa if of.scheme.definition.blocks is None else replace(of.isa, amx=False)
    return TiledMatrix(isa, of.scheme, of.n, of.k)


@cache
def kernel(of: Linear, fusion: Fusion) -> PrimFunc:
    """Returns the kernel that computes a matrix product. Its arguments are the tensors from which rows of x
    are computed, the tensors that store the weights, the bias if it is fused, int64 prompt (not 0 for prompt
    rows) if there is a variant for prompts, and out. of: the product; fusion: what the kernel computes before
    and after it. Equal products share one kernel object. Raises CompileError if there is no kernel for the
    format of the weights."""
    rows = row_format(of)
    if rows:
        return float_product.product(rows, fusion)
    return int8_product.product(tiles(of), fusion)
