"""Emits kernels that look up and dequantize rows of an embedding table, for every stored format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tvm.relax.frontend.nn import Tensor
from tvm.relax.frontend.nn.op import tensor_ir_op
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from mlcbuild.compiler.cpu.isa import ISA
from mlcbuild.compiler.cpu.kernels.format_kernels import kernel_for
from mlcbuild.compiler.cpu.kernels.table_rows import TableRow, copy_unpacked
from mlcbuild.compiler.cpu.kernels.vectors import argument, prim_func
from mlcbuild.models import Param
from mlcbuild.quant import Storage, stored


@dataclass(frozen=True)
class Embedding:
    """The lookup of rows of a stored embedding table [vocab, hidden] by token id."""

    isa: ISA
    scheme: Storage
    vocab: int
    hidden: int

    @property
    def name(self) -> str:
        return f"embedding.{self.scheme.format}.{self.isa.name}"

    def apply(self, tokens: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Emits the lookup of token ids, int32 [n], and returns their embeddings float32 [n, hidden]. Ids
        must be in 0 .. vocab - 1, which is not checked. weights: the tensors in which the scheme stores the
        embedding table (codes and scales, for example), in the order of `quant.stored`. Raises CompileError
        if CPUs have no kernel for the format in which the table is stored."""
        out = Tensor.placeholder([tokens.shape[0], self.hidden], "float32")
        lookup = kernel(self)
        return tensor_ir_op(lookup, str(lookup.attrs["global_symbol"]), [tokens, *weights], out)


def embedding(isa: ISA, scheme: Storage, vocab: int, hidden: int) -> Embedding:
    """Returns an Embedding, which emits the lookup of rows in an embedding table [vocab, hidden] that is
    stored under a quantization scheme. isa: instruction set.
    """
    return Embedding(isa, scheme, vocab, hidden)


@cache
def kernel(of: Embedding) -> PrimFunc:
    """Returns the kernel (token ids int32 [n], stored tensors of the table, out float32 [n, hidden]) of an
    embedding lookup; equal lookups share one function object. Raises CompileError if CPUs have no kernel for
    the format in which the table is stored.
    """
    scheme = of.scheme
    form = kernel_for(scheme)
    name = f"embedding_{scheme.format}_{of.vocab}x{of.hidden}"

    def body() -> None:
        n = T.int64()
        tokens = argument("tokens", (n,), "int32")
        tensors = stored(Param("table", (of.vocab, of.hidden)), scheme)
        weights = tuple(argument("table", tensor.shape, tensor.dtype) for tensor in tensors)
        out = argument("out", (n, of.hidden), "float32")
        with T.sblock(name), T.serial(0, n) as row:
            token = T.bind(T.Cast("int64", tokens[row]))
            lookup = TableRow(of.isa, of.hidden, scheme, weights, out, token, row)
            if form.copy_row is not None:
                form.copy_row(lookup)
            elif form.rows is not None:
                copy_unpacked(lookup, form.rows(of.isa, of.vocab, of.hidden))

    return prim_func(name, body)
