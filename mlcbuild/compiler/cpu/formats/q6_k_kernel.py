"""CPU kernels that multiply int8 activations with 6-bit codes in tiles of 16 rows, with scales per group of
16 weights, each the product of a float16 shared by 256 weights and an int8.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
