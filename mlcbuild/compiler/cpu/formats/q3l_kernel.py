"""CPU kernels for the stored format q3l, to which mlcbuild quantizes float weights: int8 activations are
multiplied with 3-bit codes in tiles of 16 rows, with a scale for each group of 16 weights, the product of a
float16 shared by 256 weights and an int8.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
