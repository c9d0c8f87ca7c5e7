"""CPU kernels for the stored format q8_0, which keeps the values of GGUF's Q8_0 and IQ4_NL: int8 activations
are multiplied with 8-bit codes in tiles of 16 rows, with a float16 scale for each group of 32 weights.
"""

from mlcbuild.compiler.cpu.kernels.format_kernels import FormatKernel
from mlcbuild.compiler.cpu.kernels.table_rows import copy_tiled_row

KERNELS = {"x16": FormatKernel(None, copy_tiled_row)}
