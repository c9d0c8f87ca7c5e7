"""CPU kernels for the stored format q5_1, which keeps the values of GGUF's Q5_1: int8 activations are
multiplied with 5-bit codes in tiles of 16 rows, with a float16 scale and a float16 minimum for each group of
32 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
