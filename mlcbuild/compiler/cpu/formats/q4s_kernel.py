"""CPU kernels for the stored format q4s, to which mlcbuild quantizes float weights: int8 activations are
multiplied with 4-bit codes in tiles of 16 rows, with a signed float16 scale for each group of 32 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
