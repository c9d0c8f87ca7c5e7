"""CPU kernels that multiply int8 activations with 5-bit codes in tiles of 16 rows, with scales and minima per
group of 32 weights, each the product of a float16 shared by 256 weights and a byte.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
