"""CPU kernels that multiply float32 activations with unquantized float32 matrices."""

from mlcbuild.compiler.cpu.kernels.dense import DenseRows
from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_plain

KERNELS = {"plain": FormatKernel(lambda isa, n, k: DenseRows(isa, n, k, "float32"), copy_plain)}
