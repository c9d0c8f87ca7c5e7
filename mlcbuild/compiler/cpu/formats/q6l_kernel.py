"""CPU kernels that multiply int8 activations with tiles of 6-bit codes with scales of two levels."""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
