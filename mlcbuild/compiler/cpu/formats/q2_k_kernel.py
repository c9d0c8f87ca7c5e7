"""CPU kernels for the stored format q2_k, which keeps the values of GGUF's Q2_K: int8 activations are
multiplied with 4-bit codes in tiles of 16 rows, with a scale and a minimum for each group of 16 weights, the
products of float16s shared by 256 weights and an int8 or uint8.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
